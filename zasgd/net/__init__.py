"""The only place with sockets, threads and clocks: thin shells that carry out what the cores decide."""
