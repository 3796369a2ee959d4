"""The pure core: every decision of zasgd, and no effect of any.

Nothing in this package imports a socket, a clock, a disk, a random number or torch. A core takes
`(now, message)` and returns the effects to carry out (`node.py`); `zasgd.net` carries them out for real,
`zasgd.sim` in virtual time.
"""
