"""Between torch and the flat vectors of a run: modules as vectors, tensors as wire arrays.

Decides how tensors map to numbers in a vector; never talks to a socket, and knows nothing of recipes.
"""
