"""Other libraries beside flatlens, for `python -m benchmarks.curvature` and `python -m benchmarks.peers.sgld`.

They are installed in a separate environment, never in the one that runs the tests:

    python -m venv /tmp/peers && . /tmp/peers/bin/activate
    pip install -c constraints.txt -e . psutil
    pip install -c constraints.txt einops einconv tqdm linear_operator opt-einsum jaxtyping
    pip install --no-deps curvlinops-for-pytorch backpack-for-pytorch unfoldNd pyhessian
    pip install --no-deps --pre hessian-eigenthings

Without --no-deps they bring torchvision, which no benchmark needs. devinterp brings its own:

    python -m venv /tmp/devinterp
    /tmp/devinterp/bin/pip install -c constraints.txt -e . devinterp==2.0.1

A library of `benchmarks.curvature` that is missing or fails is reported with the reason, and the others still run.
"""
