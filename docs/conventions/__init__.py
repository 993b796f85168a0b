"""docs/conventions.md: the conventions for every quantity, evaluated on small networks.

`python docs/conventions > docs/conventions.md` writes the page. A quantity is one function that returns a `Quantity`,
in the file of its family; it appears on the page once all its measures are registered.
"""
