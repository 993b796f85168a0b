"""Data sets that come with flatlens or its dependencies, and the reading of a user's own."""

from flatlens.data.digits import digits
from flatlens.data.split import Split

__all__ = ["Split", "digits"]
