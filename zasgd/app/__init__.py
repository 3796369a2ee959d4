"""What the commands do: puts recipe, network, processes and observation together. Decides nothing about training."""
