"""Causal language models against explicit Jacobians in float64, and the memory that their outputs take."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from literal_modern import close
from modern import Case, case, tokens
from networks import module_of
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.utils._python_dispatch import TorchDispatchMode

import flatlens as fl
from flatlens.curvature import GaussNewton, eigenpairs
from flatlens.grams import Sketch, one_pass

WORDS = 7


def root_mean_square(weight: nn.Parameter, eps: float) -> nn.Module:
    """Llama's norm in the arithmetic of its input; that of transformers is in float32 whatever the network's dtype."""
    return module_of(lambda net, x: net.weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt(), weight=weight)


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = {"vocab_size": WORDS, "num_key_value_heads": 1, "max_position_embeddings": 6, **shape, **changes}
    net = LlamaForCausalLM(LlamaConfig(**given))
    for name, module in list(net.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            net.set_submodule(name, root_mean_square(module.weight, module.variance_epsilon))
    return net


def neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=WORDS, max_position_embeddings=6, **shape))


def of_tokens(net: Any, embedding: str) -> Case:
    return tokens(net, "cross_entropy", embedding, WORDS, True, lambda out: out.logits)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: case("gpt2", "cross_entropy"),
    "words": lambda: case("words", "cross_entropy"),
    "llama": lambda: of_tokens(llama(), "model.embed_tokens"),
    "llama-tied": lambda: of_tokens(llama(tie_word_embeddings=True), "model.embed_tokens"),
    "neox": lambda: of_tokens(neox(), "gpt_neox.embed_in"),
}


@pytest.fixture(scope="module", params=CASES)
def model(request) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return CASES[request.param]()


def jacobians(this: Case) -> tuple[list[Tensor], list[Tensor]]:
    """(J, C) of each sample: its counted tokens' outputs side by side, all parameters one after another."""
    named = {name: p.detach() for name, p in this.net.named_parameters()}
    flat = torch.cat([p.flatten() for p in named.values()])

    def at(v: Tensor) -> dict[str, Tensor]:
        parts = v.split([p.numel() for p in named.values()])
        return {name: part.reshape(p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}

    J = [jacobian(lambda v, i=i: this.rows(at(v), i), flat) for i in range(this.n)]
    C = [hessian(lambda f, i=i: this.cost(f, i), this.rows(named, i)) for i in range(this.n)]
    return J, C


def test_the_gauss_newton_matrix_is_explicit(model: Case) -> None:
    J, C = jacobians(model)
    G = sum(j.T @ c @ j for j, c in zip(J, C, strict=True)) / model.n
    operator = GaussNewton(fl.Problem(model.net, model.loss, model.data))
    v = torch.randn(3, operator.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(operator(v), v @ G, rtol=1e-9, atol=1e-9 * float((v @ G).abs().max()))
    pairs = eigenpairs(operator, top_k=1, rtol=1e-9)
    close(float(pairs.values[0]), torch.linalg.eigvalsh(G)[-1])


@pytest.mark.parametrize("weighted", [False, True])
def test_every_probe_of_a_sketch_is_its_combination_of_rows(model: Case, weighted: bool) -> None:
    """||u^T J||^2 over all parameters, u the sketch's own numbers (times R, C = R R^T, if weighted)."""
    J, C = jacobians(model)
    problem = fl.Problem(model.net, model.loss, model.data)
    lens, sketch = fl.Lens(problem, outputs=5), Sketch(5, 11, weighted)
    counted = problem.run(model.net, problem.place(model.data))[1].counted
    for probe, chunk in enumerate(one_pass(problem, model.net, lens.plan, None, None, {"C", "K"}, sketch)):
        places = [g for g in (*chunk.layers.values(), *chunk.others.values()) if g.counts_weight or g.counts_bias]
        found = sum(g.C * g.K for g in places)[:, 0, 0]
        u = list(sketch.combinations(0, model.n, problem.outputs))[probe]
        for i in range(model.n):
            mine = u[i].reshape(*counted[i].shape, -1)[counted[i]].flatten()
            if weighted:
                blocks = C[i].reshape(len(mine) // WORDS, WORDS, -1, WORDS)
                root = torch.block_diag(*(_root(blocks[t, :, t]) for t in range(len(blocks))))
                mine = root @ mine
            close(found[i], (mine @ J[i]).square().sum())


def _root(C: Tensor) -> Tensor:
    """R = diag(sqrt p) - p sqrt(p)^T with R R^T = C / s, times sqrt(s), from C = s (diag p - p p^T) itself.

    p_j / p_k = C_jl / C_kl for every third class l, which gives p up to its sum.
    """
    p = C[0].abs().clone()
    p[0] = C[1, 0].abs() * C[0, 2] / C[1, 2]
    p = p / p.sum()
    s = -C[0, 1] / (p[0] * p[1])
    return (torch.diag(p.sqrt()) - p[:, None] * p.sqrt()) * s.sqrt()


class Alive(TorchDispatchMode):
    """The largest number of float64 tensors of at least `entries` numbers that were alive at once, and the largest."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries, self.most, self.largest = entries, 0, 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor) and t.is_floating_point():
                storage = t.untyped_storage()
                held = storage.nbytes() // t.element_size()  # an expanded number holds one
                self.largest = max(self.largest, held)
                if t.dtype == torch.float64 and held >= self.entries:
                    self._alive[storage.data_ptr()] = weakref.ref(storage)
        self._alive = {at: ref for at, ref in self._alive.items() if ref() is not None}
        self.most = max(self.most, len(self._alive))
        return out


def test_a_product_makes_no_float64_copy_of_the_logits_and_a_problem_one() -> None:
    """8 sequences of 16 tokens and 20,000 words; one token's curvature as a matrix would be 167 times the logits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = llama(vocab_size=20_000, hidden_size=8, max_position_embeddings=16)
        ids = torch.randint(0, 20_000, (8, 16))
    logits = 8 * 15 * 20_000
    with Alive(logits // 2) as alive:
        problem = fl.Problem(net, "cross_entropy", {"input_ids": ids, "labels": ids})
    assert alive.most == 1
    operator = GaussNewton(problem)
    v = torch.randn(operator.size)
    operator(v)  # the first one also draws random numbers, to check the Jacobian's two products
    with Alive(logits // 2) as alive:
        again = GaussNewton(problem)
        again.certificate = operator.certificate
        again(v)
    assert alive.most == 0
    assert alive.largest <= 8 * 16 * 20_000  # the logits, before the last token is cut off
