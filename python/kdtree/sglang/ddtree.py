"""The speculative algorithm `DDTREE`: DFlash drafters, whose drafts are verified as trees.

A DFlash drafter fills a block of masks in one pass: logits for each of the next positions. SGLang's
DFLASH takes the best token of each and verifies that chain. DDTREE takes the best 64 of each and
verifies the tree of the most likely prefixes:

    draft    the drafter's pass, as DFLASH runs it; draft_topk (merge_topk over ranks), build_ddtree
    verify   the target's pass over the tree, its mask in the buffer of the backend `kdtree_mla`
    accept   tree_accept_logits, or tree_accept where the ranks have reduced their logits
    commit   commit_kv in the target's cache; the accepted hidden states into the drafter's

The worker is SGLang's DFlashWorkerV2, which loads the drafter, prefills, and keeps the drafter's
cache; a decoding round is its own. The drafter's block and the tree have sizes of their own:
--speculative-dflash-block-size (by default the drafter's) and --speculative-num-draft-tokens.
"""

from __future__ import annotations

# pyright: reportMissingImports=false
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import (
    apply_dflash_verify_logits_adjustments,
    is_dense_head_weight,
    parse_dflash_draft_config,
)
from sglang.srt.speculative.dflash_worker_v2 import (
    DFlashWorkerV2,
    _resolve_dflash_embedding_module,
)
from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpeculativeAlgorithm
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    draft_tp_context,
)

import kdtree
from kdtree.sglang import ALGORITHM, BACKEND

__all__ = ["DDTree", "DDTreeWorker", "register"]

Tensor = torch.Tensor

#: Logits that are sorted at once.
SORTED = 1 << 25


def register() -> None:
    try:
        SpeculativeAlgorithm.from_string(ALGORITHM)
    except ValueError:  # it is not there yet
        SpeculativeAlgorithm.register(
            ALGORITHM, supports_overlap=True, validate_server_args=validate, spec_class=DDTree
        )(lambda server_args: DDTreeWorker)


def validate(args: Any) -> None:
    """Raises ValueError where the server's arguments are not served."""
    qlen = args.speculative_num_draft_tokens
    needs = {
        f"--decode-attention-backend {BACKEND}": args.decode_attention_backend == BACKEND,
        "--speculative-attention-mode decode": args.speculative_attention_mode == "decode",
        "--speculative-draft-model-path": args.speculative_draft_model_path is not None,
        f"--speculative-num-draft-tokens of 2..{kdtree.MAX_QLEN}": (
            qlen is None or 2 <= qlen <= kdtree.MAX_QLEN
        ),
        # DFLASH's sizes, by which SGLang sizes its caches; a tree has the budget alone.
        "--speculative-num-steps 1": args.speculative_num_steps in (None, 1),
        "--speculative-eagle-topk 1": args.speculative_eagle_topk in (None, 1),
        "--pp-size 1": args.pp_size == 1,
        "no --enable-dp-attention": not args.enable_dp_attention,
        "no --speculative-draft-window-size": args.speculative_draft_window_size is None,
        "no --speculative-adaptive": not args.speculative_adaptive,
        "--speculative-accept-threshold-single 1": args.speculative_accept_threshold_single == 1,
        "--speculative-accept-threshold-acc 1": args.speculative_accept_threshold_acc == 1,
        "no --enable-return-routed-experts": not args.enable_return_routed_experts,
        "no SGLANG_SIMULATE_ACC_LEN": envs.SGLANG_SIMULATE_ACC_LEN.get() <= 0,
        # With pages of one token SGLang's rows of req_to_token end before what it reserves for a
        # round: at the end of the context it would write into, and we read beyond, the next row.
        "--page-size of 2 or more": args.page_size != 1,
    }
    missing = [need for need, met in needs.items() if not met]
    if missing:
        raise ValueError(f"{ALGORITHM} needs {', '.join(missing)}")


class DDTree(CustomSpecAlgo):
    """To SGLang it is DFLASH, whose drafters and state it has, with a worker of its own."""

    def handle_server_args(self, server_args: Any) -> None:
        server_args.speculative_num_steps = server_args.speculative_eagle_topk = 1
        if server_args.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = kdtree.MAX_QLEN
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 48


def _as_dflash(name: str) -> Callable[..., Any]:
    return lambda self, *args, **options: getattr(SpeculativeAlgorithm.DFLASH, name)(
        *args, **options
    )


for _name in vars(SpeculativeAlgorithm):
    if _name.startswith(("is_", "supports_", "has_", "need_", "carries_", "build_", "create_f")):
        setattr(DDTree, _name, _as_dflash(_name))


class DDTreeWorker(DFlashWorkerV2):
    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        spec = get_spec()
        self.qlen: int = spec.speculative_num_draft_tokens
        block = spec.speculative_dflash_block_size
        if block is None:
            config = target_worker.model_runner.spec_aux_config.draft_model_config.hf_config
            block = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=16)
        if not 2 <= block <= self.qlen:
            # SGLang reserves room in the caches for the tree.
            raise ValueError(
                f"{ALGORITHM} needs --speculative-num-draft-tokens of at least the drafter's block "
                f"of {block}, got {self.qlen}"
            )
        self._drafter_sizes = {"speculative_num_draft_tokens": int(block)}
        with self._as_drafter():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        if self.selector is not None or self.lilicorr is not None or self._is_domino:
            raise ValueError(
                f"{ALGORITHM} serves plain DFlash drafters, whose positions are independent; this "
                "one has a head that chooses among candidates"
            )
        self._slots = torch.arange(self.qlen, device=self.device)
        self._head = self._head_shard()

    def _as_drafter(self) -> Any:
        """What belongs to the drafter is made for its block, not for the tree."""
        return get_spec().override(**self._drafter_sizes)

    def init_attention_backends(self) -> None:
        with self._as_drafter():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with self._as_drafter():
            super().init_cuda_graphs()

    def _maybe_build_draft_sampler(self) -> None:
        """None: the drafter's graph ends at its hidden states."""

    def prewarm_sampling(self) -> Any:
        return self.model_runner.prewarm_sampling()

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Nothing: sampling needs none of SGLang's kernels."""

    def _head_shard(self) -> tuple[Any, int, int]:
        """Of the target's head: it, the rows that this rank has, and the token of the first."""
        head = unwrap_lora_layer(getattr(self.model_runner.model, "lm_head", None))
        weight: Any = getattr(head, "weight", None)
        if not is_dense_head_weight(weight):
            raise ValueError(f"{ALGORITHM} needs a target with an unquantized lm_head")
        shard = getattr(head, "shard_indices", None)
        if shard is None:
            if get_parallel().tp_group.world_size > 1:
                raise ValueError(f"{ALGORITHM} needs an lm_head that says which tokens a rank has")
            return head, len(weight), 0
        if shard.num_added_elements:
            raise ValueError(f"{ALGORITHM} does not serve tokens added to the vocabulary")
        return head, shard.num_org_elements, shard.org_vocab_start_index

    # -- a round

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            return super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
        draft_input = batch.spec_info  # the verification puts its own there
        lens: Tensor = batch.seq_lens
        if lens.is_cuda:  # it may come from the stream of the last round
            lens.record_stream(torch.cuda.current_stream())
        places = lens[:, None] + self._slots
        table = self.model_runner.req_to_token_pool.req_to_token
        locs = table[batch.req_pool_indices[:, None], places].long()

        tree = self._tree(self._draft(batch, locs), draft_input.bonus_tokens, lens)
        grammar = None
        if batch.has_grammar:  # on its way to the host during the target's pass
            grammar = GrammarTree.from_device(tree.next_token, tree.next_sibling, tree.draft_tokens)
        plan = self._plan(batch, locs)
        target = self._verify(batch, tree, locs, plan)
        output = target.logits_output
        accept = self._accept(batch, tree, output, grammar, grammar_barrier)

        committed = accept.accept_token_num + 1
        tokens = accept.accept_tokens.clamp_min(0)  # -1 beyond the bonus
        lengths = lens + committed
        if on_publish is not None:
            on_publish(lengths)
        cache = self.model_runner.token_to_kv_pool
        kdtree.commit_kv(cache.kv_buffer, None, None, accept, cache_loc=locs)
        # From here on as after a chain: row i of a request is that of its i-th new token.
        rows = accept.accept_index.clamp_min(0) + self.qlen * torch.arange(
            len(lens), device=lens.device
        ).unsqueeze(1)
        block = self.block_size  # a path has no more
        write = self._draft_write_ids(plan).view(locs.shape)[:, :block].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=output.hidden_states[rows[:, :block].flatten()],
            cache_loc=write.flatten(),
            cache_loc_2d=write,
            positions=places[:, :block].flatten(),
            commit_lens=committed,
        )
        output.hidden_states = None  # large, and read by nobody else
        self._report(batch, draft_input, output, rows, tokens, committed)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=tokens.flatten(),
            accept_lens=committed,
            can_run_cuda_graph=target.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=tokens.gather(1, accept.accept_token_num.long()[:, None]).flatten(),
                new_seq_lens=lengths,
            ),
            speculative_num_draft_tokens=self.qlen,
            new_seq_lens=lengths,
            routed_experts_output=target.routed_experts_output,
            indexer_topk_output=target.indexer_topk_output,
        )

    def _plan(self, batch: Any, locs: Tensor) -> Any:
        """Where a pass writes, and how far beyond the committed lengths it reads."""
        return self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=self._host_lengths(batch, 0),
            write_virtual=locs.flatten(),
            read_extent=locs.shape[1],
        )

    @staticmethod
    def _host_lengths(batch: Any, slots: int) -> Any:
        """On the host, where lengths lag behind: bounds of what a pass reads."""
        if batch.seq_lens_cpu is not None:
            return batch.seq_lens_cpu + slots
        return batch.spec_info.nxt_kv_lens_cpu

    def _draft(self, batch: Any, locs: Tensor) -> Any:
        """The drafter's pass: hidden states [B,L,D] of the positions after the root."""
        block, count = self.block_size, len(locs)
        ids = locs.new_full((count, block), self._mask_token_id)
        ids[:, 0] = batch.spec_info.bonus_tokens
        target = self.model_runner.model
        embed = unwrap_lora_layer(_resolve_dflash_embedding_module(self.draft_model, target))
        embeds = embed(ids) * self._noise_embed_scale
        host = self._host_lengths(batch, block)
        pass_ = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=count,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=locs[:, :block].flatten(),
            seq_lens_sum=int(host.sum()),
            seq_lens_cpu=host,
            positions=(batch.seq_lens[:, None] + self._slots[:block]).flatten(),
            input_embeds=embeds.flatten(0, 1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                locs.new_full((), count * block, dtype=torch.int32)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=count * block,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        self._plan(batch, locs[:, :block]).bind(pass_, self.draft_model_runner.kv_index_translator)
        with (
            self._as_drafter(),
            torch.inference_mode(),
            draft_tp_context(self.draft_parallel_layout),
        ):
            hidden = self.draft_model_runner.forward(pass_).logits_output.hidden_states
        return hidden.view(count, block, -1)[:, 1:]

    def _tree(self, hidden: Tensor, roots: Tensor, lens: Tensor) -> kdtree.Tree:
        head, columns, start = self._head
        group = get_parallel().tp_group
        ranks = group.world_size
        logits = hidden.to(head.weight.dtype) @ head.weight[:columns].T
        top = kdtree.draft_topk(
            logits,
            min(self.qlen - 1, columns),
            vocab_start=start,
            normalize=ranks == 1,
        )
        if ranks > 1:
            shards = []
            for part in (top.logprobs, top.ids, top.lse):
                whole = part.new_empty(ranks * len(part), *part.shape[1:])
                group.all_gather_into_tensor(whole, part)
                shards.append(whole.view(ranks, *part.shape))
            top = kdtree.merge_topk(*shards)
        return kdtree.build_ddtree(top.logprobs, top.ids, roots, lens.int(), budget=self.qlen - 1)

    def _verify(self, batch: Any, tree: kdtree.Tree, locs: Tensor, plan: Any) -> Any:
        """The target's pass over the tree."""
        count, qlen = locs.shape
        mask = self.model_runner.attn_backend.verify_mask.buffer[: count * qlen**2]
        kdtree.expand_mask(tree, "qlen", out=mask.view(count, qlen, qlen))
        given = DFlashVerifyInput(
            draft_token=tree.draft_tokens.flatten(),
            positions=tree.positions.flatten(),
            draft_token_num=qlen,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=plan,
        )
        batch.out_cache_loc = locs.flatten()
        held = batch.seq_lens_cpu, batch.seq_lens_sum
        host = self._host_lengths(batch, qlen)
        batch.seq_lens_cpu, batch.seq_lens_sum = host, int(host.sum())
        pass_, _ = given.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = held
        return self.target_worker.forward_batch_generation(
            batch=None, forward_batch=pass_, is_verify=True, skip_attn_backend_init=True
        )

    def _accept(
        self,
        batch: Any,
        tree: kdtree.Tree,
        output: Any,
        grammar: Any,
        grammar_barrier: Callable[[], None] | None,
    ) -> kdtree.Accept:
        sampling = batch.sampling_info
        shape = tree.draft_tokens.shape
        processor = self._target_logits_processor
        site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
        if processor is not None and processor.is_deferred_shard(output.next_token_logits):
            if self._can_skip_verify_logits(batch, sampling):
                best = processor.deferred_argmax(output.next_token_logits)
                output.next_token_logits = None
                return self._agreed(site, kdtree.tree_accept(tree, best.view(shape)))
            output.next_token_logits = processor.finish_deferred_gather(output.next_token_logits)
        logits = output.next_token_logits
        mask = None
        if grammar is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar,
                sampling_info=sampling,
                device=logits.device,
                barrier=grammar_barrier,
            )
        if sampling is not None:
            apply_dflash_verify_logits_adjustments(
                next_token_logits=logits, sampling_info=sampling, draft_token_num=self.qlen
            )
        if mask is not None:
            mask.apply(logits)
        if sampling is None or sampling.is_all_greedy:
            return self._agreed(site, kdtree.tree_accept_logits(tree, logits.view(*shape, -1)))
        seeds = sampling.sampling_seed
        if seeds is None:
            seeds = torch.randint(1 << 62, shape[:1], device=logits.device)
        accept = kdtree.tree_accept_logits(
            tree,
            allowed(logits, sampling, self.qlen).view(*shape, -1),
            # SGLang's greedy requests are those that keep one token.
            temperature=sampling.temperatures.flatten()
            .float()
            .masked_fill(sampling.top_ks == 1, 0),
            seeds=seeds,
        )
        return self._agreed(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, accept)

    def _agreed(self, site: Any, accept: kdtree.Accept) -> kdtree.Accept:
        """Rank 0's, where ranks are told to agree."""
        for part in (accept.accept_index, accept.accept_token_num, accept.accept_tokens):
            self._tp_sync.sync(site, part)
        return accept

    def _report(
        self,
        batch: Any,
        draft_input: Any,
        output: Any,
        rows: Tensor,
        tokens: Tensor,
        committed: Tensor,
    ) -> None:
        """Log-probs and sampling masks, for the requests that want them."""
        sampling = batch.sampling_info
        masked = sampling is not None and sampling.sampling_mask_batch_indices is not None
        if not (masked or batch.return_logprob):
            return
        output.next_token_logits = output.next_token_logits[rows.flatten()]
        capture = SpeculativeSamplingMaskCapture.from_logits(
            sampling,
            next_token_logits=output.next_token_logits,
            draft_input=draft_input,
            draft_token_num=self.qlen,
            bs=len(rows),
        )
        if capture is not None:
            output.sampling_mask_output = capture.build_output(
                out_tokens=tokens, commit_lens=committed
            )
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, tokens.flatten(), chain_stride=self.qlen)


def allowed(logits: Tensor, sampling: Any, qlen: int) -> Tensor:
    """logits [B*Q,V] without the tokens that top-k, top-p or min-p of their request rule out."""
    if not (
        sampling.need_top_k_sampling or sampling.need_top_p_sampling or sampling.need_min_p_sampling
    ):
        return logits
    settings = sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps
    kept = torch.empty_like(logits)
    # Sorting takes several times the memory of what it sorts, which SGLang has not set aside.
    step = max(1, SORTED // (qlen * logits.shape[-1]))
    for start in range(0, len(sampling.top_ks), step):
        some = slice(start * qlen, (start + step) * qlen)
        heat, top_k, top_p, min_p = (
            each[start : start + step].view(-1, 1).repeat_interleave(qlen, 0) for each in settings
        )
        probs, order = (logits[some] / heat).softmax(-1).sort(-1, descending=True)
        ruled_out = torch.arange(probs.shape[-1], device=probs.device) >= top_k
        ruled_out |= probs.cumsum(-1) - probs > top_p
        ruled_out |= probs < probs[:, :1] * min_p
        ruled_out = torch.empty_like(ruled_out).scatter_(1, order, ruled_out)
        kept[some] = logits[some].masked_fill(ruled_out, -torch.inf)
    return kept
