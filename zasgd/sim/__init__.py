"""Virtual time: the real cores and the real wire in one process, with faults as data. Never imports `zasgd.net`."""
