"""Other libraries beside flatlens, for `python -m benchmarks.curvature`.

They are installed in a separate environment, never in the one that runs the tests:

    python -m venv /tmp/peers && . /tmp/peers/bin/activate
    pip install -c constraints.txt -e . psutil
    pip install -c constraints.txt einops einconv tqdm linear_operator opt-einsum jaxtyping
    pip install --no-deps curvlinops-for-pytorch backpack-for-pytorch unfoldNd pyhessian
    pip install --no-deps --pre hessian-eigenthings

Without --no-deps they bring torchvision, which no benchmark needs. A library that is missing or fails is reported with
the reason, and the others still run.
"""
