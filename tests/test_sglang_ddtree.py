"""DDTREE in a real SGLang: the algorithm's arguments, and rounds of its worker.

Target and drafter are small functions that run on SGLang's pools and on the backend that it builds:
the target attends to what was written and committed, so that a wrong mask, position, place or copy
changes the text. scripts/sglang_bed.py runs this.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import kdtree
import numpy as np
import pytest
from kdtree import reference

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: see scripts/sglang_bed.py", allow_module_level=True)

import torch
from kdtree import sglang as plugin
from test_sglang import DEVICE, FLAGS, HEADS, MODEL, SCALE, Setting, close, mode, sglang

__all__ = ["sglang"]  # a fixture

VOCAB, BLOCK, QLEN, MASK = 40, 6, 12, 39
PROMPT, NEW = 5, 40
ROOMS = {"speculative_num_draft_tokens": QLEN, "speculative_dflash_block_size": BLOCK}


def ddtree() -> Any:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string("DDTREE")


# The rows of plugin.SUPPORTED about it, and the tests of what its cells list.
SERVERS = "test_servers_that_it_refuses"
TRUTH = {
    "DDTREE: drafter": (
        {
            "plain DFlash": "test_the_text_is_plain_decodings",
            "blocks of up to the draft tokens": "test_drafters_that_it_refuses",
        },
        dict.fromkeys(("DFlash2", "LiLiCorr", "Domino"), "test_drafters_that_it_refuses"),
    ),
    "DDTREE: sampling": (
        {
            "greedy": "test_rounds_are_the_references",
            "temperature": "test_temperature_is_honoured",
            "top-k": "test_what_top_k_top_p_and_min_p_allow_is_sglangs",
            "top-p": "test_what_top_k_top_p_and_min_p_allow_is_sglangs",
            "min-p": "test_what_top_k_top_p_and_min_p_allow_is_sglangs",
            "seeds": "test_temperature_is_honoured",
            "penalties": "test_penalties_are_added",
            "grammars": "test_a_grammar_rules_out_tokens",
            "log-probs": "test_log_probs_are_those_of_the_new_tokens",
        },
        {},
    ),
    "DDTREE: server": (
        {
            "tensor parallel": "test_shards_of_the_vocabulary_make_the_same_tree",
            "overlap schedule": "test_lengths_may_be_unknown_to_the_host",
        },
        dict.fromkeys(
            (
                "`--page-size 1`",
                "`--pp-size`",
                "`--enable-dp-attention`",
                "`--speculative-draft-window-size`",
                "`--speculative-adaptive`",
                "acceptance thresholds",
                "`--enable-return-routed-experts`",
                "`--speculative-num-steps` or `--speculative-eagle-topk` above 1",
            ),
            SERVERS,
        )
        | {"`SGLANG_SIMULATE_ACC_LEN`": "test_it_refuses_to_simulate"},
    ),
}


def test_the_tests_of_what_is_supported_are_here():
    for cells in TRUTH.values():
        assert all(test in globals() for cell in cells for test in cell.values())


# ---- arguments


def arguments(model: Any, *changes: str) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    (model / "config.json").write_text(json.dumps(MODEL))
    names = ["--model-path", str(model), "--speculative-draft-model-path", str(model)]
    flags = FLAGS[: FLAGS.index("--speculative-algorithm")]
    flags += ["--speculative-algorithm", "DDTREE", "--page-size", "64"]
    made = prepare_server_args([*names, *flags, *changes])
    made.resolve_once()
    return resolving_view(made)


def test_arguments_of_the_algorithm(sglang, tmp_path):
    args = arguments(tmp_path)
    assert args.speculative_num_draft_tokens == kdtree.MAX_QLEN
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    args = arguments(tmp_path, "--speculative-num-draft-tokens", "20")
    assert args.speculative_num_draft_tokens == 20


NEEDS = [
    ({"decode_attention_backend": "triton"}, "--decode-attention-backend kdtree_mla"),
    ({"speculative_attention_mode": "prefill"}, "--speculative-attention-mode decode"),
    ({"speculative_num_draft_tokens": 66}, "--speculative-num-draft-tokens of 2..65"),
    ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens of 2..65"),
    ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
    ({"pp_size": 2}, "--pp-size 1"),
    ({"enable_dp_attention": True}, "no --enable-dp-attention"),
    ({"speculative_draft_window_size": 64}, "no --speculative-draft-window-size"),
    ({"speculative_adaptive": True}, "no --speculative-adaptive"),
    ({"page_size": 1}, "--page-size of 2 or more"),
    ({"enable_return_routed_experts": True}, "no --enable-return-routed-experts"),
    ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single 1"),
    ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc 1"),
    ({"speculative_num_steps": 3}, "--speculative-num-steps 1"),
    ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 1"),
]


class Changed:
    def __init__(self, args: Any, **change: Any) -> None:
        vars(self).update(change, args=args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args, name)


@pytest.mark.parametrize(("change", "need"), NEEDS)
def test_servers_that_it_refuses(sglang, tmp_path, change, need):
    from kdtree.sglang.ddtree import validate

    args = arguments(tmp_path)
    validate(args)
    with pytest.raises(ValueError, match=f"^DDTREE needs {need}$"):
        validate(Changed(args, **change))


def test_it_refuses_to_simulate(sglang, tmp_path):
    from kdtree.sglang.ddtree import validate
    from sglang.srt.environ import envs

    args = arguments(tmp_path)
    with (
        envs.SGLANG_SIMULATE_ACC_LEN.override(2.0),
        pytest.raises(ValueError, match=r"^DDTREE needs no SGLANG_SIMULATE_ACC_LEN$"),
    ):
        validate(args)


def test_sglang_asks_it(sglang, tmp_path):
    with pytest.raises(ValueError, match=r"DDTREE needs no --speculative-draft-window-size$"):
        arguments(tmp_path, "--speculative-draft-window-size", "64")


def test_to_sglang_it_is_dflash_with_another_worker(sglang):
    from kdtree.sglang.ddtree import DDTreeWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    ours, dflash = ddtree(), SpeculativeAlgorithm.DFLASH
    asked = [name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_"))]
    assert {n: getattr(ours, n)() for n in asked} == {n: getattr(dflash, n)() for n in asked}
    assert ours.create_worker(sglang.arguments) is DDTreeWorker
    assert plugin.load() == {plugin.BACKEND: [], plugin.ALGORITHM: []}  # again


def test_a_changed_worker_makes_it_alone_decline(sglang, monkeypatch, caplog):
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    monkeypatch.setattr(DFlashWorkerV2, "_draft_write_ids", lambda self, plan, rows: plan)
    left_out = plugin.load()
    assert left_out[plugin.BACKEND] == []
    (reason,) = left_out[plugin.ALGORITHM]
    assert "_draft_write_ids takes (self, plan, rows), expected (self, plan)" in reason
    assert "DDTREE stays out of SGLang" in caplog.text


def test_what_sglang_refuses_is_a_reason(sglang, monkeypatch):
    from kdtree.sglang import ddtree

    def refuse() -> None:
        raise TypeError("DDTree is missing duck-typed methods")

    monkeypatch.setattr(ddtree, "register", refuse)
    assert plugin.load()[plugin.ALGORITHM] == ["TypeError: DDTree is missing duck-typed methods"]


def test_fields_and_attributes_are_part_of_the_contract(sglang, monkeypatch):
    from kdtree.sglang import contract
    from sglang.srt.managers import scheduler
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.spec_tp_sync import SpecTpSync

    def init(self, server_args, gpu_id, nccl_port, target_worker):
        pass

    monkeypatch.setattr(scheduler, "GenerationBatchResult", lambda logits_output: None)
    monkeypatch.setattr(DFlashWorkerV2, "__init__", init)
    monkeypatch.setattr(SpecTpSync, "sync", property(lambda self: None))
    reasons = contract.differences(algorithm=True)
    for part in (
        "GenerationBatchResult is without accept_lens,",
        "__init__ is without _draft_block_spec_info,",
        "SpecTpSync.sync is a property, expected a callable",
    ):
        assert any(part in reason for reason in reasons)


# ---- rounds


class Model:
    """A target of two layers of attention on SGLang's pools; its tokens depend on all before."""

    def __init__(self, s: Setting) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        self.setting = s
        random = torch.Generator().manual_seed(0)

        def new(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(DEVICE)

        self.tokens, self.places = new(VOCAB, 576), new(200, 576)
        self.turn = new(2, HEADS, 576)
        self.read = new(512, VOCAB)
        self.layers = [RadixAttention(HEADS, 576, SCALE, 1, i, v_head_dim=512) for i in (0, 1)]

    def __call__(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden states) of a ForwardBatch whose metadata are made."""
        x = self.tokens[batch.input_ids] + self.places[batch.positions]
        for layer, turn in zip(self.layers, self.turn, strict=True):
            q = (x[:, None] * turn).half().flatten(1)
            k = x.half()[:, None]
            out = self.setting.hybrid.forward(q, k, k[..., :512], layer, batch)
            x = x + torch.nn.functional.pad(out.view(-1, HEADS, 512).float().mean(1) * 4, (0, 64))
        return x[:, :512] @ self.read / 8, x

    def text(self, rows: torch.Tensor, prompts: torch.Tensor, new: int, choose: Any) -> Any:
        """Plain decoding from an empty cache: tokens [B,prompt+new], and all hidden states."""
        tokens, states = prompts, []
        for place in range(prompts.shape[1] + new - 1):
            lens = torch.full((len(rows),), place + 1, device=DEVICE)
            out = self.setting.table[rows, place].long()
            batch = self.setting.batch(mode("DECODE"), rows, lens, out)
            batch.input_ids, batch.positions = tokens[:, place], lens - 1
            self.setting.hybrid.init_forward_metadata(batch)
            logits, hidden = self(batch)
            states.append(hidden)
            if place + 1 >= prompts.shape[1]:
                tokens = torch.cat([tokens, choose(logits, lens - 1)[:, None]], 1)
        return tokens, torch.stack(states, 1)


class Drafter:
    """Logits for a block of places: noise, and a push for the token that comes there."""

    def __init__(self, text: torch.Tensor, translator: Any) -> None:
        self.text, self.kv_index_translator, self.seen = text, translator, []
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(), vocab_size=VOCAB)

    def forward(self, batch: Any) -> Any:
        count = batch.batch_size
        ids, places = batch.input_ids.view(count, BLOCK), batch.positions.view(count, BLOCK)
        assert (ids[:, 1:] == MASK).all()
        assert torch.equal(places, batch.seq_lens[:, None] + torch.arange(BLOCK, device=DEVICE))
        assert batch.input_embeds.shape == (count * BLOCK, 576)
        noise = [[self.noise(row, p) for p in ps] for row, ps in enumerate(places.tolist())]
        logits = torch.stack([torch.stack(row) for row in noise]).to(DEVICE)
        true = self.text[batch.req_pool_indices[:, None] - 1, places]
        logits.scatter_add_(2, true[..., None], torch.full_like(logits[..., :1], 2.5))
        logits *= 3  # as sure of itself as it is right
        self.seen.append(logits)
        return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=logits.flatten(0, 1)))

    @staticmethod
    def noise(row: int, place: int) -> torch.Tensor:
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * row + place))


class Some(SimpleNamespace):
    """What a round reads of a ScheduleBatch, or a Req; the rest is None."""

    def __getattr__(self, name: str) -> None:
        return None


class Rounds:
    """A worker around a model and a drafter, and the requests that it serves."""

    def __init__(self, sglang: Any, monkeypatch: Any, rng: Any, *, page: int, prompts: Any) -> None:
        self.setting = s = Setting(sglang, page, torch.float16, ddtree())
        self.prompts = prompts
        self.rows = torch.arange(1, len(prompts) + 1, device=DEVICE)
        s.fill(rng, np.full(len(prompts), PROMPT + NEW), 3 * QLEN)
        self.model = Model(s)
        self.sglang, self.monkeypatch = sglang, monkeypatch
        self.trees: list[Any] = []
        self.outcomes: list[Any] = []
        self.kept: dict[int, torch.Tensor] = {}

    def worker(self, text: torch.Tensor, head: Any = None, **parts: Any) -> Any:
        """Made by its own __init__; what loads the drafter is a stand-in, with these parts."""
        from kdtree.sglang.ddtree import DDTreeWorker
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.speculative import dflash_worker_v2 as theirs

        runner, embed = self.setting.runner, torch.nn.Embedding(VOCAB, 576, device=DEVICE)
        runner.spec_aux_config = SimpleNamespace(draft_model_config=None)
        runner.model = torch.nn.Module()
        if head is None:
            head = torch.nn.Linear(VOCAB, VOCAB, bias=False, device=DEVICE)
            head.weight.data.copy_(torch.eye(VOCAB))
        runner.model.lm_head = head
        runner.model.get_input_embeddings = lambda: embed
        runner.attn_backend, runner.decode_cuda_graph_runner = self.setting.hybrid, None
        runner.lora_manager = None
        runner.ngram_embedding_manager = SimpleNamespace(enabled=False)

        def run(batch: Any, forward_batch: Any, **options: Any) -> Any:
            assert batch is None
            assert options["is_verify"]
            logits, hidden = self.model(forward_batch)
            self.trees.append((forward_batch.input_ids, forward_batch.positions, logits.clone()))
            output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
            return SimpleNamespace(
                logits_output=output, can_run_cuda_graph=False,
                routed_experts_output=None, indexer_topk_output=None,
            )  # fmt: skip

        drafter = Drafter(text, runner.kv_index_translator)
        model = Some(set_block_size=lambda size: None, **parts)
        bundle = SimpleNamespace(
            draft_worker=None, draft_model_runner=drafter, draft_model=model,
            resolved_attention_backend="triton",
        )  # fmt: skip
        config = SimpleNamespace(
            is_domino="prefix_gru" in parts, block_size=BLOCK, mask_token=None, mask_token_id=MASK
        )
        put = self.monkeypatch.setattr
        put(theirs, "build_draft_tp_worker", lambda **options: bundle)
        put(theirs, "draft_pp_context", contextlib.nullcontext)
        put(theirs, "parse_dflash_draft_config", lambda **options: config)
        put(theirs, "validate_domino_runtime", lambda **options: None)
        put(theirs.DFlashWorkerV2, "_init_fused_kv_helper", lambda self: None)
        put(theirs.DFlashWorkerV2, "_resolve_mask_token_id", lambda self, **options: MASK)
        put(
            DDTreeWorker,
            "_append_target_hidden_to_draft_kv_by_loc",
            lambda worker, **given: self.keep(**given),
        )
        target = SimpleNamespace(model_runner=runner, device=DEVICE, forward_batch_generation=run)
        self.drafted = drafter.seen
        return DDTreeWorker(self.sglang.arguments, 0, 0, target)

    def keep(self, target_hidden, cache_loc, cache_loc_2d, positions, commit_lens) -> None:
        """What the drafter's cache gets: the hidden states of the new tokens, by row and place."""
        assert torch.equal(cache_loc, cache_loc_2d.flatten())
        count, qlen = cache_loc_2d.shape
        rows = target_hidden.view(count, qlen, -1)
        for b, committed in enumerate(commit_lens.tolist()):
            for i in range(committed):
                place = int(positions.view(count, qlen)[b, i])
                assert cache_loc_2d[b, i] == self.setting.table[self.rows[b], place]
                self.kept[b, place] = rows[b, i]

    def plain(self, choose: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The text that plain decoding makes, and the hidden states under it."""
        self.clear()
        chosen = choose or (lambda logits, places: logits.argmax(-1))
        return self.model.text(self.rows, self.prompts, NEW + BLOCK + 1, chosen)

    def clear(self) -> None:
        for buffer in self.setting.pool.kv_buffer:
            buffer.copy_(torch.randn(buffer.shape))

    def serve(self, text: torch.Tensor, sampling: Any = None, **asked: Any) -> list[list[int]]:
        """Tokens by request, in rounds until one has NEW; `outcomes` has what the rounds return.

        What is asked is in every ScheduleBatch, or as `worker` changes that.
        """
        from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

        worker, count = self.worker(text), len(self.prompts)
        asked.pop("worker", lambda made: None)(worker)
        self.clear()
        self.model.text(self.rows, self.prompts, 1, lambda logits, places: logits.argmax(-1))
        lens = torch.full((count,), PROMPT, device=DEVICE)
        roots = text[:, PROMPT].contiguous()
        tokens = text[:, : PROMPT + 1].tolist()
        while max(map(len, tokens)) < PROMPT + NEW:
            batch = Some(
                forward_mode=mode("DECODE"),
                is_extend_in_batch=False,
                has_grammar=False,
                return_logprob=False,
                reqs=[Some(rid=str(row)) for row in range(count)],
                req_pool_indices=self.rows,
                seq_lens=lens,
                seq_lens_cpu=lens.cpu(),
                spec_info=make_draft_input_v2(bonus_tokens=roots, new_seq_lens=lens),
                spec_algorithm=ddtree(),
                sampling_info=sampling,
            )
            batch.spec_info.nxt_kv_lens_cpu = batch.seq_lens_cpu + 2 * QLEN
            batch.spec_info.max_top_k = VOCAB
            vars(batch).update(asked)
            published: list[torch.Tensor] = []
            result = worker.forward_batch_generation(batch, published.append, "barrier")
            assert result.speculative_num_draft_tokens == QLEN
            lens, taken = result.new_seq_lens, result.accept_lens.tolist()
            assert torch.equal(published[0], lens)
            assert torch.equal(lens, batch.seq_lens + result.accept_lens)
            for b, fresh in enumerate(result.next_token_ids.view(count, QLEN).tolist()):
                tokens[b] += fresh[: taken[b]]
            roots = result.next_draft_input.bonus_tokens
            assert roots.tolist() == [row[-1] for row in tokens]
            self.outcomes.append((batch, result))
        return tokens


@pytest.fixture
def rounds(sglang, monkeypatch, rng):
    def make(page: int = 1, requests: int = 3) -> Rounds:
        prompts = torch.from_numpy(rng.integers(0, VOCAB - 1, (requests, PROMPT))).to(DEVICE)
        return Rounds(sglang, monkeypatch, rng, page=page, prompts=prompts)

    alone = {"tp_rank": 0, "tp_group": SimpleNamespace(world_size=1)}
    with (
        sglang.context.get_spec().override(**ROOMS),
        sglang.context.get_parallel().override(**alone),
        torch.inference_mode(),  # as the scheduler runs
    ):
        yield make


@pytest.mark.parametrize("page", [1, 16])
def test_the_text_is_plain_decodings(rounds, page):
    r = rounds(page)
    text, states = r.plain()
    served = r.serve(text)
    for row, want in zip(served, text.tolist(), strict=True):
        assert row == want[: len(row)]
    # The drafter's cache has the hidden states of plain decoding, one a place.
    for (b, place), state in r.kept.items():
        assert close(state, states[b, place])
    assert {place for b, place in r.kept if b == 0} == set(range(PROMPT, len(served[0]) - 1))
    emitted = sum(int(result.accept_lens.sum()) for _, result in r.outcomes)
    assert emitted > 2.5 * len(r.outcomes) * len(served)


def test_rounds_are_the_references(rounds):
    r = rounds()
    text, _ = r.plain()
    r.serve(text)
    roots = text[:, PROMPT].cpu().numpy()
    for (batch, result), drafted, given in zip(r.outcomes, r.drafted, r.trees, strict=True):
        top = reference.draft_topk(drafted[:, 1:].float().cpu().numpy(), QLEN - 1)
        lens = batch.seq_lens.int().cpu().numpy()
        tree = reference.build_ddtree(top.logprobs, top.ids, roots, lens, budget=QLEN - 1)
        assert given[0].view(-1, QLEN).tolist() == tree.draft_tokens.tolist()
        assert given[1].view(-1, QLEN).tolist() == tree.positions.tolist()
        want = reference.tree_accept(tree, given[2].argmax(-1).view(-1, QLEN).cpu().numpy())
        assert (result.accept_lens - 1).tolist() == want.accept_token_num.tolist()
        tokens = result.next_token_ids.view(-1, QLEN).cpu().numpy()
        for b, n in enumerate(want.accept_token_num):
            assert tokens[b, : n + 1].tolist() == want.accept_tokens[b, : n + 1].tolist()
        roots = np.take_along_axis(tokens, want.accept_token_num[:, None], 1)[:, 0]


def test_it_accepts_more_than_the_chain(rounds):
    r = rounds()
    text, _ = r.plain()
    r.serve(text)
    tree = chain = 0
    for (batch, result), drafted in zip(r.outcomes, r.drafted, strict=True):
        tree += int((result.accept_lens - 1).sum())
        places = batch.seq_lens[:, None] + torch.arange(1, BLOCK, device=DEVICE)
        right = drafted[:, 1:].argmax(-1) == text[r.rows[:, None] - 1, places]
        chain += int(right.cumprod(1).sum())
    assert tree > 1.2 * chain > 0


def sampling(count: int, **changes: Any) -> Any:
    """SGLang's sampling of a batch: by default at temperature 2, with a seed a request."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def each(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=DEVICE)

    fields: dict[str, Any] = {
        "temperatures": each(2, torch.float32)[:, None],
        "top_ps": each(1, torch.float32),
        "top_ks": each(1 << 30, torch.int32),
        "min_ps": each(0, torch.float32),
        "is_all_greedy": False,
        "is_any_greedy": False,
        "need_top_p_sampling": False,
        "need_top_k_sampling": False,
        "need_min_p_sampling": False,
        "vocab_size": VOCAB,
        "sampling_seed": torch.arange(count, device=DEVICE) + 5,
        "device": DEVICE,
    }
    return SamplingBatchInfo(**{**fields, **changes})


def drawn(r: Rounds, info: Any) -> Any:
    """How plain decoding draws with the sampling's seeds: one-slot trees of the reference."""

    def choose(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        count = len(places)
        lone = kdtree.Tree(
            draft_tokens=np.zeros((count, 1), np.int64),
            next_token=np.full((count, 1), -1),
            next_sibling=np.full((count, 1), -1),
            num_nodes=np.ones(count, np.int32),
            positions=places.cpu().numpy()[:, None],
        )
        heat = info.temperatures.flatten().masked_fill(info.top_ks == 1, 0)
        seeds = info.sampling_seed.cpu().numpy()
        accept = reference.tree_accept_logits(
            lone, logits.cpu().numpy()[:, None], temperature=heat.cpu().numpy(), seeds=seeds
        )
        return torch.from_numpy(accept.accept_tokens[:, 0]).to(DEVICE)

    return choose


def test_temperature_is_honoured(rounds):
    """The tokens that plain decoding draws; the greedy request among them is greedy."""
    r = rounds()
    info = sampling(3)
    info.top_ks[1] = 1
    text, _ = r.plain(drawn(r, info))
    greedy, _ = r.plain()
    served = r.serve(text, info)
    for row, want in zip(served, text.tolist(), strict=True):
        assert row == want[: len(row)]
    same = [a == b for a, b in zip(text.tolist(), greedy.tolist(), strict=True)]
    assert same == [False, True, False]


def test_without_seeds_it_draws_anew(rounds):
    r = rounds()
    text, _ = r.plain()
    drawn = [r.serve(text, sampling(3, sampling_seed=None))[0] for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_what_top_k_top_p_and_min_p_allow_is_sglangs(sglang, rng, monkeypatch):
    from kdtree.sglang import ddtree
    from kdtree.sglang.ddtree import allowed
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    logits = torch.from_numpy(rng.standard_normal((3 * 4, VOCAB), np.float32) * 3).to(DEVICE)
    info = sampling(
        3,
        top_ks=torch.tensor([5, 1 << 30, 12], dtype=torch.int32, device=DEVICE),
        top_ps=torch.tensor([1, 0.8, 0.9], device=DEVICE),
        min_ps=torch.tensor([0, 0, 0.05], device=DEVICE),
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
    )
    assert allowed(logits, sampling(3), 4) is logits
    monkeypatch.setattr(ddtree, "SORTED", 2 * 4 * VOCAB)  # two requests, then one
    got = allowed(logits, info, 4)
    top_k, top_p, min_p = (x.repeat_interleave(4) for x in (info.top_ks, info.top_ps, info.min_ps))
    weights, order = top_k_top_p_min_p_sampling_from_probs_torch(
        (logits / 2).softmax(-1), top_k, top_p, min_p, True, None, None,
        return_filtered_probs=True,
    )[1:3]  # fmt: skip
    kept = torch.zeros_like(got, dtype=torch.bool).scatter_(1, order.long(), weights > 0)
    assert torch.equal(got, logits.masked_fill(~kept, -torch.inf))
    assert 1 < int(kept.sum()) < kept.numel()


def test_log_probs_are_those_of_the_new_tokens(rounds):
    r = rounds()
    text, _ = r.plain()
    asked = {"return_logprob": True, "top_logprobs_nums": [0] * 3, "token_ids_logprobs": [None] * 3}
    r.serve(text, sampling(3, is_all_greedy=True), **asked)
    for (_, result), (_, _, logits) in zip(r.outcomes, r.trees, strict=True):
        best = logits.log_softmax(-1).amax(-1).tolist()
        found = result.logits_output.next_token_logprobs
        for b, n in enumerate(result.accept_lens.tolist()):
            assert all(p in best for p in found[b, :n].tolist())  # greedy: each slot's best


def test_lengths_may_be_unknown_to_the_host(rounds):
    r = rounds()
    text, _ = r.plain()
    served = r.serve(text, seq_lens_cpu=None)
    for row, want in zip(served, text.tolist(), strict=True):
        assert row == want[: len(row)]


def test_ranks_may_hand_over_their_maxima_alone(rounds):
    r = rounds()
    text, _ = r.plain()
    shard = SimpleNamespace(
        is_deferred_shard=lambda logits: True, deferred_argmax=lambda logits: logits.argmax(-1)
    )
    served = r.serve(text, worker=lambda made: setattr(made, "_target_logits_processor", shard))
    for row, want in zip(served, text.tolist(), strict=True):
        assert row == want[: len(row)]
    assert all(result.logits_output.next_token_logits is None for _, result in r.outcomes)


def test_a_grammar_rules_out_tokens(rounds, monkeypatch):
    from kdtree.sglang import ddtree

    r = rounds()
    free, _ = r.plain()
    banned = int(free[0, PROMPT + 3])

    def ban(logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(-1, torch.tensor([banned], device=DEVICE), -torch.inf)

    def mask(reqs, tree, sampling_info, device, barrier):
        next_token, next_sibling, draft_tokens = tree.resolve()
        assert draft_tokens.shape == next_token.shape == next_sibling.shape == (3, QLEN)
        assert barrier == "barrier"
        return SimpleNamespace(apply=ban)

    monkeypatch.setattr(ddtree, "build_grammar_vocab_mask", mask)
    text, _ = r.plain(lambda logits, places: ban(logits).argmax(-1))
    served = r.serve(text, has_grammar=True)
    for row, want in zip(served, text.tolist(), strict=True):
        assert row == want[: len(row)]
        assert banned not in row[PROMPT + 1 :]


def test_penalties_are_added(rounds):
    """As SGLang's workers do: those of before the round, to every slot of it."""
    r = rounds()
    bias = torch.zeros(3, VOCAB, device=DEVICE)
    bias[:, 7] = 1e4
    info = sampling(3, is_all_greedy=True, logit_bias=bias)
    text, _ = r.plain(lambda logits, places: (logits + bias).argmax(-1))
    assert {token for row in r.serve(text, info) for token in row[PROMPT:]} == {7}


@pytest.mark.skipif(
    DEVICE == "cuda" and importlib.util.find_spec("flashinfer") is None,
    reason="SGLang's top-k of probabilities is FlashInfer's on a GPU",
)
def test_sampling_masks_are_of_the_new_tokens(rounds):
    r = rounds()
    text, _ = r.plain()
    info = sampling(
        3,
        top_ks=torch.full((3,), 4, dtype=torch.int32, device=DEVICE),
        need_top_k_sampling=True,
        sampling_mask_batch_indices=torch.arange(3, device=DEVICE),
        sampling_mask_top_ks=[4, 4, 4],
    )
    text, _ = r.plain(drawn(r, info))
    r.serve(text, info)
    for _, result in r.outcomes:
        tokens = result.next_token_ids.view(3, QLEN)
        support = result.logits_output.sampling_mask_output.token_ids.view(3, QLEN, -1)
        for b, n in enumerate(result.accept_lens.tolist()):
            for i in range(n):
                assert tokens[b, i] in support[b, i]


def test_shards_of_the_vocabulary_make_the_same_tree(rounds, monkeypatch):
    from kdtree.sglang import ddtree

    r = rounds()
    text, _ = r.plain()
    worker = r.worker(text)
    hidden = torch.randn(3, BLOCK - 1, VOCAB, device=DEVICE)
    roots, lens = text[:, PROMPT].contiguous(), torch.full((3,), PROMPT, device=DEVICE)
    whole = worker._tree(hidden, roots, lens)
    half = VOCAB // 2
    parts = [
        kdtree.draft_topk(hidden[..., at : at + half], QLEN - 1, vocab_start=at, normalize=False)
        for at in (0, half)
    ]
    fields = iter(("logprobs", "ids", "lse"))

    def gather(received: torch.Tensor, sent: torch.Tensor) -> None:
        ranks = [getattr(part, field) for field in [next(fields)] for part in parts]
        assert torch.equal(sent, ranks[1])
        received.copy_(torch.cat(ranks))

    head = worker._head[0]
    head.weight.data = head.weight.data[half:]
    worker._head = head, half, half
    two = SimpleNamespace(world_size=2, all_gather_into_tensor=gather)
    monkeypatch.setattr(ddtree, "get_parallel", lambda: SimpleNamespace(tp_group=two))
    tree = worker._tree(hidden, roots, lens)
    for name in ("draft_tokens", "parents", "visibility", "num_nodes"):
        assert torch.equal(getattr(tree, name), getattr(whole, name))


def test_drafters_that_it_refuses(sglang, rounds, monkeypatch):
    from kdtree.sglang import ddtree

    r = rounds()
    text, _ = r.plain()
    with (
        sglang.context.get_spec().override(speculative_dflash_block_size=QLEN + 1),
        pytest.raises(ValueError, match="at least the drafter's block of 13, got 12"),
    ):
        r.worker(text)
    domino = {
        name: SimpleNamespace(hidden_size=1) for name in ("prefix_gru", "embed_proj", "config")
    }
    for parts in ({"candidate_selector": object()}, {"lilicorr": object()}, domino):
        with pytest.raises(ValueError, match="serves plain DFlash drafters"):
            r.worker(text, **parts)
    with pytest.raises(ValueError, match="a target with an unquantized lm_head"):
        r.worker(text, head=torch.nn.Identity())
    two = SimpleNamespace(tp_group=SimpleNamespace(world_size=2))
    monkeypatch.setattr(ddtree, "get_parallel", lambda: two)
    with pytest.raises(ValueError, match="says which tokens a rank has"):
        r.worker(text)
