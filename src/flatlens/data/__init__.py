"""The data sets of the papers' experiments, and readers for the user's own data.

Nothing to download: `digits`, `patches`, `clusters` (and `inverted`, their inputs through a network), `eight_points`,
`waves` on a known law.
From files: `mnist`, `fashion_mnist`, `cifar10`, `cifar100`, each prepared by a `Preparation`; `fetch` gets the files.
"""

from flatlens.data.bundled import digits, patches
from flatlens.data.download import Fetched, fetch
from flatlens.data.image_sets import IMAGE_SETS, ImageSet, cifar10, cifar100, default_root, fashion_mnist, mnist
from flatlens.data.sources import DataSettings, UserData, load_data
from flatlens.data.split import Preparation, Split
from flatlens.data.synthetic import Inversion, clusters, eight_points, inverted, inverted_clusters, waves

__all__ = [
    "IMAGE_SETS", "DataSettings", "Fetched", "ImageSet", "Inversion", "Preparation", "Split", "UserData", "cifar10",
    "cifar100", "clusters", "default_root", "digits", "eight_points", "fashion_mnist", "fetch", "inverted",
    "inverted_clusters", "load_data", "mnist", "patches", "waves",
]  # fmt: skip
