"""What lies between and around networks: the loss along paths, on planes, and how far its quadratic holds."""

from flatlens.landscape.path import LossPath, Way, path
from flatlens.landscape.plane import LossPlane, Slice, plane

__all__ = ["LossPath", "LossPlane", "Slice", "Way", "path", "plane"]
