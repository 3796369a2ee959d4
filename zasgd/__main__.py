"""`python -m zasgd` is the `zasgd` command."""

from zasgd.cli import main

if __name__ == "__main__":
    main()
