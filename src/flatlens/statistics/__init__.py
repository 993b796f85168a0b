"""Statistics over populations of networks: correlations (plain, partial, granulated), and agreement of rankings."""

from flatlens.statistics.agreement import concordance, kendall_w
from flatlens.statistics.average import average, share
from flatlens.statistics.bootstrap import Correlation, with_interval
from flatlens.statistics.clustered import clustered
from flatlens.statistics.coefficients import kendall, pearson, spearman
from flatlens.statistics.correlations import all_pairs, correlate
from flatlens.statistics.draws import permutations, resamples
from flatlens.statistics.granulated import granulated_kendall
from flatlens.statistics.joint import benjamini_hochberg, holm, in_cases
from flatlens.statistics.partial import partial_correlation
from flatlens.statistics.relate import Relations, relate
from flatlens.statistics.relations import relate_all, relate_within
from flatlens.statistics.statistic import Statistic
from flatlens.statistics.within import within_groups

__all__ = [
    "Correlation",
    "Relations",
    "Statistic",
    "all_pairs",
    "average",
    "benjamini_hochberg",
    "clustered",
    "concordance",
    "correlate",
    "granulated_kendall",
    "holm",
    "in_cases",
    "kendall",
    "kendall_w",
    "partial_correlation",
    "pearson",
    "permutations",
    "relate",
    "relate_all",
    "relate_within",
    "resamples",
    "share",
    "spearman",
    "with_interval",
    "within_groups",
]
