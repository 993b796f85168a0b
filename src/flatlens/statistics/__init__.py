"""Statistics over populations of networks: correlations (plain, partial, granulated), and agreement of rankings."""

from flatlens.statistics.correlations import all_pairs, concordance, correlate, kendall_w, partial_correlation
from flatlens.statistics.group_differences import GroupDifference, group_differences
from flatlens.statistics.groupwise import (
    Relations,
    granulated_kendall,
    relate,
    relate_all,
    relate_within,
    within_groups,
)
from flatlens.statistics.inference import average, benjamini_hochberg, clustered, holm, in_cases, in_readings, share
from flatlens.statistics.resampling import (
    Correlation,
    kendall,
    pearson,
    permutations,
    resamples,
    spearman,
    with_interval,
)
from flatlens.statistics.statistic import Statistic

__all__ = [
    "Correlation", "GroupDifference", "Relations", "Statistic", "all_pairs", "average", "benjamini_hochberg",
    "clustered", "concordance", "correlate", "granulated_kendall", "group_differences", "holm", "in_cases",
    "in_readings", "kendall", "kendall_w", "partial_correlation", "pearson", "permutations", "relate", "relate_all",
    "relate_within", "resamples", "share", "spearman", "with_interval", "within_groups",
]  # fmt: skip
