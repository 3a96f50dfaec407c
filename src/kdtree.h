/* kdtree.h: the C ABI of libkdtree_kernels_c, and the contract of every op.
 *
 * One round of tree speculation, for each request of a batch:
 *
 *   kdtree_draft_topk      drafter logits -> top-K log-probs and ids per future position
 *   kdtree_merge_topk      (tensor parallel) top-K of vocabulary shards -> one top-K
 *   kdtree_build_ddtree    top-K -> best-first draft tree under a node budget
 *   kdtree_tree_links      (trees built elsewhere) parents -> links, depths, visibility
 *   kdtree_expand_mask     (other engines) visibility words -> boolean or packed masks
 *   kdtree_verify_attn     MLA-absorbed attention: paged prefix + ancestor-masked tree tail
 *   kdtree_tree_accept     walk the tree along the target's tokens
 *   kdtree_tree_accept_logits  the same walk, straight from the target's logits
 *   kdtree_commit_kv       move accepted KV rows to their final places, all layers
 *
 * Symbols: B requests; Q tree slots per request, root included, 1..KDTREE_MAX_QLEN;
 * L draft depth; K candidates per position, 1..KDTREE_MAX_K; V vocabulary columns;
 * H query heads. Keys are 576 wide (latent 512 + rope 64), values are the first 512.
 *
 * Conventions, the same for every op:
 *  - `int kdtree_<op>(const kdtree_<op>_params *params, void *stream)`. `stream` is a
 *    cudaStream_t (NULL: the legacy default stream) and is ignored for CPU memory.
 *  - Set struct_size to sizeof(the struct) and zero the rest before filling it in. A library
 *    newer than its caller reads the members that the caller lacks as zero.
 *  - All pointers of one call live on one device: device_type and device_id are DLPack's
 *    (1 CPU, 2 CUDA, 3 CUDA pinned host = CPU, 13 CUDA managed = CUDA).
 *  - Dims and strides count elements. Where no stride is given for a dimension it is dense.
 *    Outputs are contiguous and overlap no input.
 *  - Nothing is allocated on the device, nothing is read back, nothing waits: every CUDA op may
 *    be captured in a graph. Every output element is written.
 *  - Returns a kdtree_status; never aborts, prints or throws. On failure nothing was launched and
 *    the outputs are untouched; kdtree_last_error() names the argument, what was expected and
 *    what was found.
 *
 * The tree (see KDTREE_MAX_QLEN):
 *   draft_tokens i64[B,Q]  slot 0 is the root: the last emitted token, whose KV is not yet written
 *   parents      i32[B,Q]  slot of the parent, < the slot; -1 for the root and unused slots
 *   depths       i32[B,Q]  0 for the root; 0 in unused slots
 *   positions    i64[B,Q]  prefix_lens[b] + depth
 *   next_token   i64[B,Q]  first child; -1 = none
 *   next_sibling i64[B,Q]  next sibling, ascending; -1 = none
 *   visibility   i64[B,Q]  bit (j-1) set: this slot sees node j (its ancestors and itself).
 *                          The root is always seen and needs no bit. 0 in unused slots
 *   scores       f32[B,Q]  sum of log-probs along the path; 0 for the root; -inf unused
 *   num_nodes    i32[B]    used slots, root included; 0 marks a padding request
 */
#ifndef KDTREE_H_
#define KDTREE_H_

#include <stdint.h>

#if defined(__GNUC__)
#define KDTREE_API __attribute__((visibility("default")))
#else
#define KDTREE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KDTREE_ABI_VERSION 1
/* 64 nodes fit one 64-bit ancestor word, and the root, which every node sees, needs no bit. */
#define KDTREE_MAX_QLEN 65
#define KDTREE_MAX_K 64
#define KDTREE_LATENT_DIM 512
#define KDTREE_ROPE_DIM 64
/* Leading dimensions of draft_topk and merge_topk. */
#define KDTREE_MAX_LEAD_DIMS 6

typedef enum kdtree_status {
  KDTREE_OK = 0,
  KDTREE_ERROR_VALUE = 1,   /* an argument is out of range or inconsistent */
  KDTREE_ERROR_TYPE = 2,    /* a dtype or device type that the op does not take */
  KDTREE_ERROR_NO_CODE = 3, /* no driver, no such GPU, or a GPU this build has no code for */
  KDTREE_ERROR_CUDA = 4,    /* the CUDA runtime reported an error */
  KDTREE_ERROR_MEMORY = 5,  /* host or device memory ran out */
  KDTREE_ERROR_INTERNAL = 6 /* a defect of this library */
} kdtree_status;

typedef enum kdtree_dtype {
  KDTREE_I32 = 1,
  KDTREE_I64 = 2,
  KDTREE_F16 = 3,
  KDTREE_BF16 = 4,
  KDTREE_F32 = 5,
  KDTREE_F8E4M3 = 6 /* e4m3fn */
} kdtree_dtype;

typedef enum kdtree_mask_layout {
  KDTREE_MASK_QLEN = 1,    /* bool[B,Q,Q] */
  KDTREE_MASK_FULL = 2,    /* flat bool, Q x (prefix + Q) per request */
  KDTREE_MASK_PACKED32 = 3 /* i32[B,Q,ceil(Q/32)], bit j = column j, low bit first */
} kdtree_mask_layout;

/* ---- draft_topk: logits[..., V] -> top-k of each row, descending; equal logits: smallest id
 * first; NaN counts as -inf. ids = vocab_start + column. Columns with vocab_start + column >=
 * vocab_size are padding and never chosen; fewer than k real columns: the rest is -inf with id
 * -1. lse = log-sum-exp of the real columns (-inf when all are -inf). normalize: logprobs =
 * logit - lse; otherwise the logits as they are, for merge_topk. With root_tokens, one for each of
 * lead_dims[0] requests (lead_ndim >= 1), the rows of those that are negative are padding: whatever
 * they hold, they come out as logprobs -inf, ids -1 and lse -inf. */
typedef struct kdtree_draft_topk_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  const void *logits; /* [lead..., V] bf16, f16 or f32; V is dense */
  int32_t logits_dtype;
  int32_t lead_ndim; /* 0..KDTREE_MAX_LEAD_DIMS */
  int64_t lead_dims[KDTREE_MAX_LEAD_DIMS];
  int64_t logits_lead_strides[KDTREE_MAX_LEAD_DIMS];
  int64_t vocab;           /* V, columns of this shard */
  int64_t vocab_start;     /* id of column 0 */
  int64_t vocab_size;      /* size of the whole vocabulary; < 0: no column is padding */
  int32_t k;               /* 1..min(KDTREE_MAX_K, V) */
  int32_t normalize;       /* bool */
  float *logprobs;         /* out f32[lead..., k] */
  int64_t *ids;            /* out i64[lead..., k] */
  float *lse;              /* out f32[lead...] */
  const void *root_tokens; /* [lead_dims[0]] i32 or i64, or NULL: no row is padding */
  int32_t root_tokens_dtype;
  int32_t reserved;
} kdtree_draft_topk_params;

/* ---- merge_topk: the un-normalized top-k of S vocabulary shards -> one normalized top-k, equal
 * to the unsharded one in every id. An id of -1 marks an empty place. */
typedef struct kdtree_merge_topk_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  const float *values; /* [S, lead..., K], K is dense */
  const void *ids;     /* [S, lead..., K] i32 or i64, K is dense */
  const float *lse;    /* [S, lead...] */
  int32_t ids_dtype;
  int32_t lead_ndim;
  int64_t shards; /* S, at least 1 */
  int64_t lead_dims[KDTREE_MAX_LEAD_DIMS];
  int64_t values_shard_stride, ids_shard_stride, lse_shard_stride;
  int64_t values_lead_strides[KDTREE_MAX_LEAD_DIMS];
  int64_t ids_lead_strides[KDTREE_MAX_LEAD_DIMS];
  int64_t lse_lead_strides[KDTREE_MAX_LEAD_DIMS];
  int32_t k; /* 1..KDTREE_MAX_K */
  int32_t reserved;
  float *logprobs;  /* out f32[lead..., k] */
  int64_t *out_ids; /* out i64[lead..., k] */
  float *out_lse;   /* out f32[lead...] */
} kdtree_merge_topk_params;

/* ---- build_ddtree: best-first tree of at most `budget` nodes; Q = budget + 1.
 * Nodes are prefixes of rank tuples. A node's score is accumulated in float64 from its heap
 * parent: sibling = w - lp[d,r] + lp[d,r+1], child = w + lp[d+1,0]. Pop order: larger score; on
 * equal scores the lexicographically smaller rank tuple, a prefix before its extension. Slots are
 * in pop order. The first -inf or NaN candidate ends its row.
 * chain_seed: the top-1 chain takes the first min(L, budget) slots, in depth order.
 * node_cost: with n nodes (root excluded) the value is (1 + sum of e^score) / (base_cost +
 * node_cost[n]) in float64; the next node is taken while that makes the value larger. The chain
 * of chain_seed is taken first, the stop rule starts after it.
 * A negative root token marks a padding request: num_nodes 0 and all slots unused. */
typedef struct kdtree_build_ddtree_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  int64_t batch, depth, k;    /* B, L >= 0, K in 1..KDTREE_MAX_K */
  const float *logprobs;      /* [B,L,K], each row descending */
  const void *ids;            /* [B,L,K] i32 or i64 */
  const void *root_tokens;    /* [B] i32 or i64 */
  const int32_t *prefix_lens; /* [B] */
  const float *node_cost;     /* [Q] or NULL: no stop rule */
  int64_t logprobs_stride_b, logprobs_stride_l;
  int64_t ids_stride_b, ids_stride_l;
  int32_t ids_dtype, root_tokens_dtype;
  int32_t budget;     /* 0..KDTREE_MAX_QLEN - 1 */
  int32_t chain_seed; /* bool */
  double base_cost;   /* read only with node_cost; finite */
  int64_t *draft_tokens;
  int32_t *parents;
  int32_t *depths;
  int64_t *positions;
  int64_t *next_token;
  int64_t *next_sibling;
  int64_t *visibility;
  float *scores;
  int32_t *num_nodes;
} kdtree_build_ddtree_params;

/* ---- tree_links: what follows from parents alone, for trees built elsewhere. A slot whose parent
 * is out of range, at or above itself, or itself broken, is broken: visibility 0, depth 0, links
 * -1, nobody's child. Without prefix_lens, positions are depths. */
typedef struct kdtree_tree_links_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  int64_t batch, qlen;
  const int32_t *parents; /* [B,Q] */
  int64_t parents_stride_b;
  const int32_t *num_nodes;   /* [B], clamped to 0..Q */
  const int32_t *prefix_lens; /* [B] or NULL */
  int32_t *depths;
  int64_t *positions;
  int64_t *next_token;
  int64_t *next_sibling;
  int64_t *visibility;
} kdtree_tree_links_params;

/* ---- expand_mask: visibility words -> a mask in another engine's layout. An unused row sees the
 * prefix and the root. FULL needs prefix_lens; elements of `out` past its size are set to 0. */
typedef struct kdtree_expand_mask_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  int64_t batch, qlen;
  const int64_t *visibility; /* [B,Q] */
  int64_t visibility_stride_b;
  const int32_t *num_nodes;   /* [B], clamped to 0..Q */
  const int32_t *prefix_lens; /* [B]; FULL only */
  int32_t layout;             /* kdtree_mask_layout */
  int32_t reserved;
  void *out; /* bool (one byte, 0 or 1) or i32, see kdtree_mask_layout */
  /* Elements of out. QLEN and PACKED32: exactly the layout's; FULL on CPU: exactly the sum over
   * requests; FULL on CUDA: the caller's word, never written past. */
  int64_t out_numel;
} kdtree_expand_mask_params;

/* ---- verify_attn: softmax(sm_scale * q k^T + mask) v over a paged MLA cache, with k = the whole
 * 576-wide row and v its first 512. Slot s of the tree has its key at position prefix_lens[b] + s,
 * and every slot sees the whole prefix, the root, and the nodes of its visibility word.
 * visibility NULL: causal (slot s sees slots 0..s). Bits at num_nodes or above are ignored. Rows
 * of unused slots see the prefix and the root; they are written too. num_nodes[b] == 0 is padding:
 * output 0, lse -inf, nothing of the request is read.
 * A key that no row of its request sees may hold NaN. Keys and values are the cache's times
 * kv_scale. Deterministic; kv_split (a multiple of 64, 0: chosen here) pins the split length so
 * that a request's bits do not depend on its neighbours or on the batch size. */
typedef struct kdtree_verify_attn_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  int64_t batch, qlen, heads; /* B, 1..KDTREE_MAX_QLEN, 1..128 */
  const void *q;              /* [B,Q,H,576], or [B,Q,H,512] with q_rope */
  const void *q_rope;         /* [B,Q,H,64] or NULL */
  int64_t q_stride_b, q_stride_q, q_stride_h;
  int64_t q_rope_stride_b, q_rope_stride_q, q_rope_stride_h;
  int32_t q_dtype;              /* bf16 or f16; also of out */
  int32_t kv_dtype;             /* q_dtype or e4m3 */
  const void *kv_cache;         /* [pages, page_size, 576] */
  int64_t num_pages, page_size; /* page_size: a power of two, 1..128 */
  int64_t kv_stride_page, kv_stride_row;
  const int32_t *block_table; /* [B,M]; or NULL with the CSR form below, which needs page_size 1 */
  int64_t block_table_stride_b, block_table_width; /* width M */
  const int32_t *kv_indptr;                        /* [B+1]; each request lists prefix + Q rows */
  const void *kv_indices;                          /* [kv_indices_len] i32 or i64 */
  int64_t kv_indices_len;
  int32_t kv_indices_dtype;
  int32_t reserved;
  const int32_t *prefix_lens; /* [B] */
  const int64_t *visibility;  /* [B,Q] or NULL */
  int64_t visibility_stride_b;
  const int32_t *num_nodes;  /* [B] or NULL: all Q */
  const float *kv_scale_ptr; /* one element on the device, or NULL: kv_scale below */
  float kv_scale;
  float sm_scale;
  int64_t kv_split; /* multiple of 64; 0: chosen here */
  void *out;        /* q_dtype [B,Q,H,512] */
  float *lse;       /* f32 [B,Q,H], natural log, or NULL */
  void *workspace;  /* 256-byte aligned device bytes; may be NULL when 0 bytes are needed */
  int64_t workspace_bytes;
} kdtree_verify_attn_params;

/* ---- verify_attn_workspace: bytes that are enough for every length, and for every kv_split unless
 * no_kv_split says that it stays 0. CPU memory needs none. */
typedef struct kdtree_verify_attn_workspace_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  int64_t batch, qlen, heads;
  int32_t no_kv_split; /* bool */
  int32_t reserved;
  int64_t *bytes; /* out, on the host */
} kdtree_verify_attn_workspace_params;

/* ---- tree_accept: from the root, go to the child whose token equals target_predict at the
 * current slot (lowest slot on duplicates) until there is none. accept_token_num counts the
 * accepted draft tokens n, without the bonus; accept_tokens[b,:n+1] are the new tokens, the bonus
 * last; accept_index[b,:n+1] the slots walked, the root first; both -1 beyond. A link that does
 * not ascend or is not below num_nodes counts as -1. Padding requests: n 0 and all -1. */
typedef struct kdtree_tree_accept_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  int64_t batch, qlen;
  const void *draft_tokens;   /* [B,Q] i32 or i64, as the three below */
  const void *next_token;     /* [B,Q] */
  const void *next_sibling;   /* [B,Q] */
  const void *target_predict; /* [B,Q] */
  int64_t draft_tokens_stride_b, next_token_stride_b, next_sibling_stride_b,
      target_predict_stride_b;
  int32_t draft_tokens_dtype, next_token_dtype, next_sibling_dtype, target_predict_dtype;
  const int32_t *num_nodes;  /* [B], clamped to 0..Q */
  int32_t *accept_index;     /* out [B,Q] */
  int32_t *accept_token_num; /* out [B] */
  int64_t *accept_tokens;    /* out [B,Q] */
} kdtree_tree_accept_params;

/* ---- tree_accept_logits: the same walk; the target's token at a visited slot is drawn from
 * logits[b, slot]. Temperature 0: argmax, lowest id on ties, NaN as -inf. Above 0: a sample of
 * softmax(logits / temperature) by the Gumbel-max rule, with noise from Philox4x32-10 keyed by
 * seeds[b] and counted by (the slot's position, the token id): the same request gives the same
 * tokens in any batch slot, and in a tree as in plain decoding. Columns >= vocab_size are padding.
 * A row without a finite logit gives token -1 and ends the walk. */
typedef struct kdtree_tree_accept_logits_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  int64_t batch, qlen;
  const void *draft_tokens; /* [B,Q] i32 or i64, as the two below */
  const void *next_token;
  const void *next_sibling;
  int64_t draft_tokens_stride_b, next_token_stride_b, next_sibling_stride_b;
  int32_t draft_tokens_dtype, next_token_dtype, next_sibling_dtype;
  int32_t logits_dtype;
  const int32_t *num_nodes; /* [B] */
  const int64_t *positions; /* [B,Q] or NULL: the depth in the walk counts the noise */
  int64_t positions_stride_b;
  const void *logits; /* [B,Q,V] bf16, f16 or f32; V is dense */
  int64_t logits_stride_b, logits_stride_q;
  int64_t vocab;                /* V */
  int64_t vocab_size;           /* < 0: no column is padding */
  const float *temperature_ptr; /* [B] on the device, or NULL: temperature below */
  const int64_t *seeds;         /* [B]; needed unless temperature_ptr is NULL and temperature 0 */
  float temperature;            /* >= 0; entries of the array that are negative or NaN count as 0 */
  int32_t reserved;
  int32_t *accept_index;
  int32_t *accept_token_num;
  int64_t *accept_tokens;
} kdtree_tree_accept_logits_params;

/* ---- commit_kv: in every layer, the row of slot accept_index[b,i] goes to position
 * prefix_lens[b] + i, for i in 0..accept_token_num[b]; all rows are read before any is written.
 * With cache_loc instead of block_table, cache_loc[b,s] is the flat row of slot s, and the row of
 * slot accept_index[b,i] goes to cache_loc[b,i]. Rows outside the cache are left alone. */
typedef struct kdtree_commit_kv_params {
  int64_t struct_size;
  int32_t device_type, device_id;
  int64_t batch, qlen;
  void *const *kv_caches; /* host array of num_layers pointers, each [pages, page_size, D] */
  int64_t num_layers;
  int64_t num_pages, page_size, row_elements; /* row_elements D */
  int64_t kv_stride_page, kv_stride_row;
  int64_t element_size;       /* bytes: 1, 2, 4, 8 or 16 */
  const int32_t *block_table; /* [B,M] or NULL */
  int64_t block_table_stride_b, block_table_width;
  const int32_t *prefix_lens; /* [B]; NULL allowed with cache_loc */
  const int64_t *cache_loc;   /* [B,Q] or NULL */
  int64_t cache_loc_stride_b;
  const int32_t *accept_index; /* [B,Q] */
  int64_t accept_index_stride_b;
  const int32_t *accept_token_num; /* [B] */
} kdtree_commit_kv_params;

KDTREE_API int kdtree_draft_topk(const kdtree_draft_topk_params *params, void *stream);
KDTREE_API int kdtree_merge_topk(const kdtree_merge_topk_params *params, void *stream);
KDTREE_API int kdtree_build_ddtree(const kdtree_build_ddtree_params *params, void *stream);
KDTREE_API int kdtree_tree_links(const kdtree_tree_links_params *params, void *stream);
KDTREE_API int kdtree_expand_mask(const kdtree_expand_mask_params *params, void *stream);
KDTREE_API int kdtree_verify_attn(const kdtree_verify_attn_params *params, void *stream);
KDTREE_API int kdtree_verify_attn_workspace(const kdtree_verify_attn_workspace_params *params,
                                            void *stream);
KDTREE_API int kdtree_tree_accept(const kdtree_tree_accept_params *params, void *stream);
KDTREE_API int kdtree_tree_accept_logits(const kdtree_tree_accept_logits_params *params,
                                         void *stream);
KDTREE_API int kdtree_commit_kv(const kdtree_commit_kv_params *params, void *stream);

/* ---- the library itself */
KDTREE_API int kdtree_abi_version(void); /* KDTREE_ABI_VERSION */
KDTREE_API int kdtree_max_qlen(void);    /* KDTREE_MAX_QLEN */
KDTREE_API const char *kdtree_status_string(int status);
/* Of the calling thread's last failed call; "" before any. Valid until its next call. */
KDTREE_API const char *kdtree_last_error(void);
/* One JSON object: version, commit, cuda_archs, cuda_toolkit. Static storage. */
KDTREE_API const char *kdtree_build_info(void);

/* What is in the machine. These initialise the CUDA driver. */
typedef struct kdtree_device_info_params {
  int64_t struct_size;
  int32_t device_id;      /* in: ordinal; ignored when there is none */
  int32_t device_count;   /* out; 0 without a driver or a GPU */
  int32_t driver_version; /* out: as cudaDriverGetVersion, 0 without a driver */
  int32_t cc_major, cc_minor;
  int32_t num_sms;
  int64_t total_memory;
  char name[256];
  char path[16];    /* out: "sm90", "sm80", or "" when this build has no code for the GPU */
  char reason[256]; /* out: why path is empty or device_count is 0 */
} kdtree_device_info_params;
KDTREE_API int kdtree_device_info(kdtree_device_info_params *params);

/* Memory on either device, for callers without an allocator of their own. On CUDA both in the order
 * of `stream` (cudaStreamLegacy for the default one), or both with NULL: then at once, and the free
 * waits for all work of the device. */
KDTREE_API int kdtree_malloc(int32_t device_type, int32_t device_id, int64_t bytes, void *stream,
                             void **ptr);
KDTREE_API int kdtree_free(int32_t device_type, int32_t device_id, void *ptr, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* KDTREE_H_ */
