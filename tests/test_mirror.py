"""tests/ mirrors src/flatlens: a module has a test file of its name, or is listed here with the one that tests it."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent / "src" / "flatlens"
ELSEWHERE = {
    # Parts of a check of bounds: they have no result but the two sides of a theorem's file
    "bounds/test_bad_input.py": "bounds/check bounds/registry report/bounds",
    "bounds/test_bound.py": "bounds/claim",
    "bounds/test_relative.py": "bounds/expansion bounds/kinks bounds/relative_generalisation",
    "bounds/test_residual.py": "bounds/skips",
    "bounds/test_sharpening.py": "bounds/covered bounds/growth bounds/target",
    "bounds/test_sides.py": "bounds/context bounds/quantities",
    # A transform's finding, moving and proving are one call
    "transforms/test_invariance.py": "transforms/cells transforms/registry",
    "transforms/test_transform.py": (
        "transforms/batchnorm transforms/moves transforms/permutation transforms/rescaling transforms/rules "
        "transforms/wiring"
    ),
    # Parts of each statistic
    "statistics/test_correlations.py": "statistics/coefficients statistics/draws statistics/exclusions",
    "statistics/test_partial.py": "statistics/within",
    "statistics/test_relations.py": "statistics/bootstrap statistics/statistic",
    # Matrices are tested by their products and traces, not by how these are computed
    "curvature/test_calibration.py": "curvature/probes curvature/trace",
    "curvature/test_krylov.py": "curvature/recall curvature/spectrum",
    "curvature/test_operators.py": "curvature/graphs curvature/jacobians curvature/space",
    "measures/test_minibatches.py": "perturbation/spread",
    "measures/test_steps.py": "perturbation/steps",
    "measures/test_sketched.py": "curvature/jacobian_norms grams/sketch",
    "truths/test_literal_curvature.py": "curvature/blocks curvature/directions",
    # The plan of the pass and its parts have no result but the pass's numbers
    "grams/test_contractions.py": "grams/dense grams/weight",
    "grams/test_one_pass.py": (
        "grams/explicit grams/facts grams/first_layer grams/jacobians grams/layer_grams grams/layout "
        "grams/planned_weights grams/planner grams/shared grams/small_parameters grams/structure grams/trial "
        "grams/unexplained"
    ),
    "grams/test_made.py": "operations/made",
    "grams/test_output_jacobians.py": "grams/record grams/second_derivative",
    "grams/test_rows.py": "grams/broken",
    "grams/test_wiring.py": "grams/certificate grams/features grams/places grams/proof",
    # What a Problem checks when it is made
    "problem/test_left_alone.py": "problem/state",
    "problem/test_losses.py": "problem/loss",
    "problem/test_odd_input.py": "problem/opening",
    "problem/test_problem.py": "problem/checks problem/inspection",
    "problem/test_shapes.py": "problem/heads",
    "problem/test_streams.py": "problem/data",
    "problem/test_users_code.py": "problem/failures",
    # A run of training is tested step by step, whichever settings it has
    "training/stack/test_together.py": (
        "training/stack/chain training/stack/kinds training/stack/lanes training/stack/trial training/stack/updates"
    ),
    "training/test_literal_steps.py": "training/ascent training/optimisers training/step",
    "training/test_odd_input.py": "training/settings training/training_data",
    "training/test_resume.py": "training/checkpoint training/run",
    "training/test_train.py": "training/losses training/stopping",
    # Figures and tables are tested as the pages show them
    "cli/test_bounds.py": "report/figures/chain",
    "cli/test_invariance.py": "report/invariance",
    "papers/test_reproduce.py": "report/reproduction",
    "report/test_compare.py": "report/figures/ranks",
    "report/test_figures.py": (
        "report/figures/figure report/figures/gap report/figures/matrix report/figures/networks report/palette"
    ),
    "report/test_measured.py": "report/figures/depth",
    "report/test_page.py": "report/cards report/reference report/render",
    "report/test_plots.py": "report/figures/plots",
    "report/test_tracked.py": "report/figures/tracked",
    # Parts of a study's folder and result
    "experiments/test_study.py": "experiments/finished",
    "papers/test_archive.py": "experiments/archive experiments/schema",
    # Options that commands share
    "cli/test_command_line.py": "cli/inputs cli/listing cli/names cli/output",
    "cli/test_cost.py": "cli/memory",
    "cli/test_study.py": "cli/known cli/running",
    "papers/test_predictions.py": "papers/evidence papers/experiment",
    "papers/test_units.py": "statistics/joint",
    # The table of operations and the searches are tested by what reads them
    "operations/test_table.py": "operations/activations",
    "operations/test_heads.py": "operations/head_sides operations/product_weights",
    "operations/test_reads.py": "operations/graph",
    "perturbation/test_certified.py": "perturbation/chain perturbation/inputs",
    "perturbation/test_sharded.py": "problem/shards",
    "perturbation/test_searches.py": "perturbation/ascent perturbation/level",
    "distributions/test_covering.py": "distributions/distribution",
    # Networks and data sets are tested as users name them
    "data/test_data_sources.py": "data/named data/sources data/split",
    "data/test_folders.py": "data/raw",
    "data/test_originals.py": "data/imagesets",
    "data/test_preparation.py": "data/images",
    "models/test_architectures.py": "models/checks models/lenet models/resnet models/vgg",
    "models/test_checkpoints.py": "models/weightfiles",
    "models/test_model_sources.py": "models/hub models/sources",
    "models/test_transformers_sources.py": "models/preparing",
    # A study has no result but its folder; a comparison and a tracker none but their tables
    "comparing/test_compare.py": "comparing/alike comparing/comparison comparing/direction",
    "experiments/test_building.py": "experiments/parts",
    "experiments/test_executors.py": "experiments/ondask experiments/workers",
    "experiments/test_findings.py": "experiments/result",
    "experiments/test_progress_files.py": "experiments/progress_reporter",
    "experiments/test_settings.py": "experiments/quantities",
    "experiments/test_store.py": "experiments/folders experiments/versions",
    "tracking/test_tracker.py": "tracking/history tracking/isolated tracking/schedule",
    # Used everywhere
    "measures/test_registry.py": "registry",
    "test_result.py": "estimate files version",
    "test_options.py": "former",
    "test_extras.py": "errors",
}
"""The modules without a test file of their own, by the file that tests them; each group begins with the reason."""
RECIPES = ("papers/sharpening/", "papers/compression/", "papers/relative2021/", "papers/reparam2019", "papers/remarks")
"""Settings and claims of single papers: tests/papers/test_papers.py runs every experiment and weighs every claim."""

MODULES = [
    module.relative_to(SOURCES).with_suffix("").as_posix()
    for module in sorted(SOURCES.rglob("*.py"))
    if not module.stem.startswith("__")
]
LISTED = {module: file for file, modules in ELSEWHERE.items() for module in modules.split()}


def has_its_own(module: str) -> bool:
    """Return whether tests/ has the file of a module's name in the folder of the same name."""
    folder, _, name = module.rpartition("/")
    return (HERE / folder / f"test_{name}.py").is_file()


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith(RECIPES)])
def test_a_module_has_a_test_file_of_its_name_or_is_listed(module: str) -> None:
    assert has_its_own(module) != (module in LISTED), f"write tests/.../test_{module.rpartition('/')[2]}.py, or list it"


def test_what_is_listed_exists() -> None:
    assert set(LISTED) <= set(MODULES)
    assert sum(len(modules.split()) for modules in ELSEWHERE.values()) == len(LISTED)
    assert not [file for file in LISTED.values() if not (HERE / file).is_file()]
    assert len([module for module in MODULES if module.startswith("measures/")]) > 20
    assert not [module for module in LISTED if module.startswith("measures/")]
