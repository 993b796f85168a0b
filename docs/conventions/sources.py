"""The public code that rows speak of, as it was when it was looked at."""

from __future__ import annotations

CODE: list[tuple[str, str, str, str]] = [
    ("ASAM", "SamsungLabs/ASAM", "asam.py", "dc9b513"),
    ("curvlinops", "f-dangel/curvlinops", "curvlinops/gradient_moments.py", "007118a"),
    ("davda54/sam", "davda54/sam", "sam.py", "03c7768"),
    (
        "hessian-eigenthings",
        "noahgolmant/pytorch-hessian-eigenthings",
        "hessian_eigenthings/operators/hessian.py",
        "3633298",
    ),
    ("jacobian_regularizer", "facebookresearch/jacobian_regularizer", "jacobian/jacobian.py", "45655cc"),
    ("loss-landscape", "tomgoldstein/loss-landscape", "hess_vec_prod.py", "97a5d99"),
    ("PyHessian", "amirgholami/PyHessian", "pyhessian/hessian.py", "00c4f3b"),
    (
        "relativeFlatnessGeneralization",
        "kampmichael/relativeFlatnessGeneralization",
        "calculate_measures.py",
        "ce80506",
    ),
    (
        "RelativeFlatnessAndGeneralization",
        "kampmichael/RelativeFlatnessAndGeneralization",
        "CorrelationFlatnessGeneralization/measure_comparison.py, .../utils.py",
        "1ffe031",
    ),
    ("", "", "RelativeFlatnessRegularizer(FAM)/FAMloss.py", "13d5aa5"),
    ("", "", "SyntheticExperiments/flatness.py, .../utils.py, .../interpolatingness.py", "2e8f513"),
    (
        "reparameterization-and-flatness-measures",
        "jq-liu/reparameterization-and-flatness-measures",
        "normalized_sharpness.py",
        "9ca1bc6",
    ),
    (
        "robust-generalization-measures",
        "nitarshan/robust-generalization-measures",
        "data/generation/measures.py, .../logs.py",
        "8e90129",
    ),
    ("sharpdim", "chinsengi/sharpdim (computes compression's quantities)", "src/utils.py", "f41f1d1"),
    ("", "", "src/pert.py (also at d166f94), vit_exp.py", "13e614c"),
    ("sharpness-vs-generalization", "tml-epfl/sharpness-vs-generalization", "sharpness.py", "4a953d3"),
    ("torch", "pytorch/pytorch", "documentation of `mse_loss`, `spectral_norm`", "2.x"),
]
