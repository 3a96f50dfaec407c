"""A tensor-parallel round: python examples/tensor_parallel.py --ranks 2, or under torchrun.

Every rank has a slice of the vocabulary, for drafter and target, and some of the attention heads.
In a round the ranks talk twice, each time in one all-gather of a few kilobytes:

    drafter logits, a slice    top-K of the slice      -> all-gather -> merge, the tree
    verify_attn, some heads
    target logits, a slice     largest of every slot   -> all-gather -> merge, the walk
    commit_kv, the rank's own copy of the cache

What follows a gather is the same computation on the same bits, so all ranks end with the same tree
and the same tokens, and none has to tell the others.

That is checked over --rounds rounds. In half of them the logits are full of exact ties. In the
others they are too, but every rank's copy is off by an ulp here and there, as copies of replicated
activations are: trees that each rank built from its own copy would differ, and how often is
printed. Every round is also compared with the unsharded one, over the columns and heads that the
ranks used. Any difference ends in exit status 1.

Then the microseconds of a round with one layer, by rank, against the same round without its two
gathers: the first ratio is what they cost. "alone" is a lone GPU with these columns and heads: the
second ratio also has two merges in it, and the largest logit of every slot, where a lone GPU reads
only the slots that it visits. More layers have the same two gathers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kdtree import Round

SCALE, PAGE = 192**-0.5, 64
HOT = 12  # tokens that drafter and target prefer

Tensor = torch.Tensor
# all_gather(received, sent), by its name in this torch.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Shape:
    """A round over all ranks."""

    batch: int
    depth: int
    k: int
    budget: int
    vocab: int
    heads: int
    prefix: int  # longest

    @property
    def slots(self) -> int:
        return self.budget + 1


@dataclass
class Inputs:
    draft_logits: Tensor  # [B,L,V]
    target_logits: Tensor  # [B,Q,V]
    roots: Tensor
    prefix_lens: Tensor
    q: Tensor  # [B,Q,H,576]
    cache: Tensor  # [1,pages,PAGE,576], one layer
    table: Tensor


class Group:
    """The ranks, and this one's share."""

    def __init__(self, device: str) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device, torch.cuda.current_device() if device == "cuda" else 0)

    def columns(self, logits: Tensor, rank: int) -> Tensor:
        """A rank's slice of [..., V], padded at the end with what must not be chosen."""
        width = -(-logits.shape[-1] // self.count)
        part = logits[..., rank * width : (rank + 1) * width]
        return torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=1e9)

    def share(self, x: Inputs) -> Inputs:
        heads = x.q.shape[2] // self.count
        return replace(
            x,
            draft_logits=self.columns(x.draft_logits, self.rank),
            target_logits=self.columns(x.target_logits, self.rank),
            q=x.q[:, :, self.rank * heads : (self.rank + 1) * heads],
        )

    def shared_round(self, shape: Shape, dtype: torch.dtype) -> Round:
        return self.new_round(
            replace(shape, heads=shape.heads // self.count),
            dtype,
            vocab_size=shape.vocab,
            vocab_start=self.rank * -(-shape.vocab // self.count),
            shards=self.count,
            all_gather=all_gather,
        )

    def new_round(self, shape: Shape, dtype: torch.dtype, **options: Any) -> Round:
        return Round(
            torch.empty(0, device=self.device),
            batch=shape.batch,
            depth=shape.depth,
            k=shape.k,
            budget=shape.budget,
            heads=shape.heads,
            dtype=dtype,
            sm_scale=SCALE,
            **options,
        )

    def random_state(self, shape: Shape, dtype: torch.dtype, g: torch.Generator) -> Inputs:
        """Everything but logits."""
        batch, most = shape.batch, shape.prefix + shape.slots
        pages = -(-most // PAGE)
        on_device: dict[str, Any] = {"device": self.device, "generator": g}
        order = torch.randperm(batch * pages, **on_device)
        return Inputs(
            draft_logits=torch.empty(0),
            target_logits=torch.empty(0),
            roots=torch.randint(-1, shape.vocab, (batch,), **on_device),
            prefix_lens=torch.randint(shape.prefix + 1, (batch,), **on_device).int(),
            q=torch.randn(batch, shape.slots, shape.heads, 576, **on_device).to(dtype),
            cache=torch.randn(1, batch * pages, PAGE, 576, **on_device).to(dtype),
            table=order.view(batch, pages).int(),
        )


def run_round(r: Round, x: Inputs) -> None:
    r.draft(x.draft_logits, x.roots, x.prefix_lens)
    r.verify(x.q, x.cache[0], x.table, x.prefix_lens)
    r.accept(x.target_logits, root_tokens=x.roots)
    r.commit(x.cache, x.table, x.prefix_lens)


# ---- the check


def tied_logits(shape: Shape, slots: int, g: torch.Generator) -> Tensor:
    """Whole numbers; the HOT tokens, which all slices have, are the largest."""
    size = (shape.batch, slots, shape.vocab)
    logits = torch.randint(3, size, generator=g, device=g.device)
    hot = torch.linspace(0, shape.vocab - 1, HOT, device=g.device).long()
    logits[..., hot] += torch.randint(3, 6, (*size[:2], HOT), generator=g, device=g.device)
    return logits.float()


def off_by_ulps(x: Tensor, g: torch.Generator) -> Tensor:
    return torch.nextafter(x, x + torch.randint(-1, 2, x.shape, generator=g, device=g.device))


def bits(*records: Any) -> Tensor:
    """Every bit of some records, as int64."""
    arrays = [getattr(r, e.name) for r in records for e in fields(r)]
    return torch.cat(
        [(x.view(torch.int32) if x.is_floating_point() else x).reshape(-1).long() for x in arrays]
    )


def check(group: Group, shape: Shape, rounds: int) -> bool:
    """Whether all was as it should be; rank 0 prints."""
    g = torch.Generator(group.device).manual_seed(0)
    dtype = torch.float16
    mine = group.shared_round(shape, dtype)
    whole, alone = group.new_round(shape, dtype), group.new_round(shape, dtype)
    state = group.random_state(shape, dtype, g)
    state.cache, whole_cache = state.cache.clone(), state.cache.clone()
    heads = shape.heads // group.count
    own_heads = slice(group.rank * heads, (group.rank + 1) * heads)

    # Nothing is read back before the last round: a result a line, and counters.
    results = torch.zeros((rounds, bits(mine.top, mine.tree, mine.accepted).numel()))
    results = results.long().to(group.device)
    own_trees = torch.zeros((rounds, mine.tree.parents.numel() * 2)).long().to(group.device)
    counters = torch.zeros(7, dtype=torch.float64, device=group.device)
    accepted, other_ids, other_accept, other_cache, other_trees, score_error, error = counters

    for i in range(rounds):
        fresh = group.random_state(shape, dtype, g)
        state.roots, state.prefix_lens, state.q = fresh.roots, fresh.prefix_lens, fresh.q
        logits = [tied_logits(shape, n, g) for n in (shape.depth, shape.slots)]
        copies = [
            [off_by_ulps(x, g) for x in logits] if i % 2 else logits for _ in range(group.count)
        ]
        state.draft_logits, state.target_logits = copies[group.rank]
        run_round(mine, group.share(state))
        results[i] = bits(mine.top, mine.tree, mine.accepted)
        accepted += mine.accepted.accept_token_num.sum()

        tree = alone.draft(state.draft_logits, state.roots, state.prefix_lens)
        own_trees[i] = torch.cat([tree.draft_tokens.view(-1), tree.parents.view(-1)])

        # The unsharded round, of the columns that the ranks used.
        used = [
            torch.cat([group.columns(x, s) for s, x in enumerate(part)], -1)[..., : shape.vocab]
            for part in zip(*copies, strict=True)
        ]
        tree = whole.draft(used[0], state.roots, state.prefix_lens)
        other_ids += (whole.top.ids != mine.top.ids).any()
        # Sums in another order: the last bit of a log-prob may order equal sums otherwise.
        other_trees += (tree.parents != mine.tree.parents).any()
        apart = (tree.scores - mine.tree.scores).abs().nan_to_num(0)  # unused: -inf less -inf
        score_error.copy_(torch.maximum(score_error, apart.max()))
        whole.tree = mine.tree
        whole.verify(state.q, whole_cache[0], state.table, state.prefix_lens)
        apart = (whole.out[:, :, own_heads] - mine.out).float().norm() / whole.out.float().norm()
        error.copy_(torch.maximum(error, apart))
        whole.accept(used[1])
        other_accept += (bits(whole.accepted) != bits(mine.accepted)).any()
        whole.commit(whole_cache, state.table, state.prefix_lens)
        other_cache += (whole_cache != state.cache).any()
        whole.tree = tree

    def of_all(x: Tensor) -> Tensor:
        gathered = x.new_empty(group.count * x.numel())
        all_gather(gathered, x.view(-1))
        return gathered.view(group.count, *x.shape)

    def differing(x: Tensor) -> int:
        """Lines that are not the same on all ranks."""
        gathered = of_all(x)
        return int((gathered != gathered[0]).flatten(2).any(-1).any(0).sum())

    differ = differing(results)
    differ_cache = differing(state.cache.view(torch.uint8))
    differ_alone = differing(own_trees)
    worst = of_all(counters).amax(0).tolist()
    accepted, other_ids, other_accept, other_cache, other_trees, score_error, error = worst
    lines = [
        (differ == 0, f"{differ} differ between ranks in tree, log-probs or tokens"),
        (differ_cache == 0, f"{differ_cache} caches differ between ranks"),
        (other_ids == 0, f"{other_ids:.0f} have other candidates than the unsharded round"),
        (
            score_error < 1e-4,
            f"scores of nodes are within {score_error:.1e} of the unsharded round",
        ),
        (other_accept == 0, f"{other_accept:.0f} have other tokens than the unsharded round"),
        (other_cache == 0, f"{other_cache:.0f} have another cache than the unsharded round"),
        (error < 2.5e-3, f"attention is within {error:.1e} of that of all heads on one device"),
    ]
    if group.rank == 0:
        print(f"{rounds} rounds on {group.count} ranks, {accepted:.0f} draft tokens accepted:")
        for good, line in lines:
            print(f"  {'ok    ' if good else 'FAILED'} {line}")
        print(f"  of the {rounds // 2} with copies that differ by ulps, {differ_alone} would have")
        print("  had other trees on other ranks, each building from its own copy")
        print(f"  in {other_trees:.0f}, rounding ordered equal scores otherwise than unsharded")
    return all(good for good, _ in lines)


# ---- the time


def median_us(group: Group, call: Callable[[], Any]) -> float:
    """Microseconds of a call that starts on all ranks together; on a GPU as a graph, L2 flushed."""
    for _ in range(3):
        call()
    if group.device.type == "cpu":
        seconds = []
        for _ in range(7):
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return 1e6 * statistics.median(seconds)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that asks
        call()
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=group.device)
    together = torch.zeros(1, device=group.device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(31)]
    for i, (start, end) in enumerate(events):
        scratch.fill_(i)
        dist.all_reduce(together)
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def time_rounds(group: Group, shape: Shape) -> None:
    g = torch.Generator(group.device).manual_seed(1)
    dtype = torch.bfloat16
    state = group.random_state(shape, dtype, g)
    state.roots.fill_(1)
    state.prefix_lens.fill_(shape.prefix)
    for name, slots in (("draft_logits", shape.depth), ("target_logits", shape.slots)):
        logits = torch.randn(
            shape.batch, slots, shape.vocab, generator=g, device=group.device, dtype=dtype
        )
        setattr(state, name, logits)
    x = group.share(state)
    mine = group.shared_round(shape, dtype)
    share = replace(shape, vocab=x.draft_logits.shape[-1], heads=x.q.shape[2])
    lone = group.new_round(share, dtype)
    exchanges = [e for e in (mine.draft_exchange, mine.accept_exchange) if e]

    def gathers() -> None:
        for exchange in exchanges:
            all_gather(exchange.received, exchange.sent)

    times = [median_us(group, call) for call in (partial(run_round, mine, x), gathers)]
    mine.all_gather = lambda received, sent: None  # what was received stays
    times += [median_us(group, partial(run_round, r, x)) for r in (mine, lone)]
    table = torch.tensor(times, device=group.device)
    of_ranks = table.new_empty(group.count * len(times))
    all_gather(of_ranks, table)
    if group.rank == 0:
        shared, gathered, no_gathers, alone = of_ranks.view(group.count, -1).T.tolist()
        by_rank = "".join(f"{t:7.0f}" for t in shared)
        ratios = [max(a / b for a, b in zip(shared, x, strict=True)) for x in (no_gathers, alone)]
        print(
            f"  {shape.batch:5} {by_rank:>8} {max(no_gathers):11.0f} {ratios[0]:6.2f}"
            f" {max(alone):6.0f} {ratios[1]:6.2f} {max(gathered):8.0f}"
            f" {sum(e.sent.numel() for e in exchanges):11,}",
            flush=True,
        )


# ---- the processes


def work(device: str, options: argparse.Namespace) -> None:
    """One rank, whose process group is set up."""
    group = Group(device)
    size = {"vocab": options.vocab, "heads": options.heads}
    good = check(group, Shape(batch=3, depth=5, k=8, budget=20, prefix=150, **size), options.rounds)
    if group.rank == 0 and options.batch:
        by_rank = f"{'by rank':>{max(8, 7 * group.count)}}"
        print(f"\n  batch {by_rank}  no gathers  ratio  alone  ratio  gathers  bytes sent")
    for batch in options.batch:
        time_rounds(
            group, Shape(batch=batch, depth=8, k=16, budget=32, prefix=options.prefix, **size)
        )
    if not good:
        raise SystemExit(1)


def start(local_rank: int, device: str, options: argparse.Namespace, **init: Any) -> None:
    """A process of its own."""
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        init["device_id"] = torch.device("cuda", local_rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **init)
    try:
        work(device, options)
    finally:
        dist.destroy_process_group()


def start_spawned(rank: int, store: str, device: str, options: argparse.Namespace) -> None:
    start(
        *(rank, device, options),
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.ranks,
    )


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def main() -> None:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=count, default=gpus or 4, help="ranks to start, one a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu")
    parser.add_argument("--rounds", type=count, default=2000, help="rounds to check")
    parser.add_argument("--batch", type=count, nargs="*", default=[1, 8, 32], help="to time")
    parser.add_argument("--vocab", type=count, help="163840, on a CPU 1021")
    parser.add_argument("--heads", type=count, help="of all ranks: 64, on a CPU 8")
    parser.add_argument("--prefix", type=count, help="to time, in tokens: 4096, on a CPU 64")
    options = parser.parse_args()
    launched = "LOCAL_RANK" in os.environ  # by torchrun
    if launched:
        options.ranks = int(os.environ["WORLD_SIZE"])
    small = options.device == "cpu"
    options.vocab = options.vocab or (1021 if small else 163_840)
    options.heads = options.heads or (8 if small else 64)
    options.prefix = options.prefix or (64 if small else 4096)
    if options.heads % options.ranks:
        parser.error(f"--ranks: expected a divisor of the {options.heads} heads")
    if options.vocab < 16 * options.ranks:
        parser.error("--vocab: expected 16 columns a rank or more")
    if launched:
        start(int(os.environ["LOCAL_RANK"]), options.device, options)
        return
    if options.device == "cuda" and options.ranks > gpus:
        parser.error(f"--ranks: expected up to {gpus}, the GPUs here")
    # kdtree's threads on a CPU: the ranks share it.
    os.environ.setdefault("KDTREE_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            start_spawned, (f"{folder}/store", options.device, options), options.ranks
        )


if __name__ == "__main__":
    main()
