"""The data sets of the papers' experiments, and readers for the user's own data.

Nothing to download: `digits`, `patches`, `clusters` (and `inverted`, their inputs through a network), `eight_points`,
`waves` on a known law.
From files: `mnist`, `fashion_mnist`, `cifar10`, `cifar100`, each prepared by a `Preparation`; `fetch` gets the files.
"""

from flatlens.data.clusters import clusters
from flatlens.data.digits import digits
from flatlens.data.fetch import Fetched, fetch
from flatlens.data.imagesets import IMAGE_SETS, ImageSet
from flatlens.data.inversion import Inversion, inverted, inverted_clusters
from flatlens.data.local import cifar10, cifar100, default_root, fashion_mnist, mnist
from flatlens.data.named import DataSettings
from flatlens.data.patches import patches
from flatlens.data.points import eight_points
from flatlens.data.preparation import Preparation
from flatlens.data.split import Split
from flatlens.data.user_data import UserData
from flatlens.data.waves import waves

__all__ = [
    "IMAGE_SETS",
    "DataSettings",
    "Fetched",
    "ImageSet",
    "Inversion",
    "Preparation",
    "Split",
    "UserData",
    "cifar10",
    "cifar100",
    "clusters",
    "default_root",
    "digits",
    "eight_points",
    "fashion_mnist",
    "fetch",
    "inverted",
    "inverted_clusters",
    "mnist",
    "patches",
    "waves",
]
