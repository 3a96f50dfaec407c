// verify_attn on CUDA: cuts the call into row tiles and pieces of keys, runs the attention kernel
// of the device's path, and merges partial results. attention/README.md has the whole picture.
#include <algorithm>

#include "cuda/attention/kernels.h"
#include "cuda/attention/schedule.h"
#include "cuda/launch.h"

namespace kdtree::cuda {

static attention::Schedule splits_for(int64_t batch, int64_t qlen, int64_t heads, bool pinned) {
  const int64_t rows = qlen * heads;
  return attention::schedule(batch, qlen, heads, pinned, sm80::tile_rows(rows),
                             sm80::blocks_per_sm(rows), num_sms());
}

// Few rows are bound by memory, which the portable kernel fills as well.
static bool on_sm90(const attention::Schedule &s) {
  return current_path() == Path::sm90 && s.tile_rows == 64;
}

// Equal splits suit one request, pinned ones have no choice, and few rows do not take long enough.
static bool has_plan(const attention::Schedule &s, int64_t batch, bool pinned) {
  return !pinned && batch > 1 && batch <= attention::kMaxPlanned && s.tile_rows == 64;
}

// Rows that whole tiles leave over, where a tile of few rows pays. That takes many of them: a
// second kind of tile is more code to load. Pinned calls do not ask how many, so that a request's
// bits do not depend on its batch.
static int few_rows(const attention::Schedule &s, int64_t batch, bool pinned) {
  const int rows = s.rows % s.tile_rows;
  if (!on_sm90(s) || s.tiles == 1 || rows == 0 || rows > sm90::kFewRows) return 0;
  return pinned || batch * std::min(s.tiles, 9) >= s.at_once ? rows : 0;
}

int64_t verify_attn_workspace(int64_t batch, int64_t qlen, int64_t heads, bool pinned) {
  attention::Schedule s = splits_for(batch, qlen, heads, pinned);
  if (!has_plan(s, batch, pinned)) return s.workspace_bytes();
  const int64_t whole = std::max(s.workspace_bytes(), planned(s, batch).workspace_bytes());
  s.few_rows = few_rows(s, batch, pinned);
  return std::max(whole, planned(s, batch).workspace_bytes());
}

void verify_attn(const kdtree_verify_attn_params &p, Stream stream) {
  attention::Schedule s = splits_for(p.batch, p.qlen, p.heads, p.kv_split > 0);
  const int64_t blocks = p.batch * s.splits * s.tiles;
  if (blocks > INT32_MAX || p.batch * s.rows > INT32_MAX)
    throw ValueError("batch: expected fewer than 2^31 rows (batch * qlen * heads), got batch " +
                     std::to_string(p.batch));
  if (p.kv_dtype == p.q_dtype) s.few_rows = few_rows(s, p.batch, p.kv_split > 0);
  if (has_plan(s, p.batch, p.kv_split > 0)) s = planned(s, p.batch);

  attention::Params a{};
  a.p = p;
  a.rows = s.rows, a.tiles = s.tiles, a.splits = s.splits;
  a.few_rows = s.few_rows, a.load = s.load();
  a.entry_bytes = p.block_table == nullptr && p.kv_indices_dtype == KDTREE_I64 ? 8 : 4;
  while (int64_t(1) << a.page_shift < p.page_size) ++a.page_shift;
  a.parts = s.parts, a.max_pieces = s.max_pieces, a.max_merges = s.max_merges;
  char *workspace = static_cast<char *>(p.workspace);
  a.pieces = reinterpret_cast<attention::Piece *>(workspace);
  a.merges = reinterpret_cast<attention::Merge *>(a.pieces + a.max_pieces);
  a.partial_out = reinterpret_cast<float *>(workspace + s.plan_bytes());
  a.partial_lse = a.partial_out + s.places * s.rows * attention::kLatent;
  if (s.parts > 0) attention::plan(a, s.at_once, stream);
  if (on_sm90(s))
    sm90::attention(a, stream);
  else
    sm80::attention(a, stream);
  if (s.places > 0) attention::combine(a, stream);
}

}  // namespace kdtree::cuda
