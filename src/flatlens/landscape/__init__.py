"""What lies between and around networks: the loss along paths, on planes, and how far its quadratic holds."""

from flatlens.landscape.path import LossPath, Way, path
from flatlens.landscape.plane import LossPlane, plane
from flatlens.landscape.slices import Slice

__all__ = ["LossPath", "LossPlane", "Slice", "Way", "path", "plane"]
