// commit_kv on the CPU: one (layer, request) at a time, through a buffer of its rows.
#include <cstring>
#include <vector>

#include "cpu/parallel.h"
#include "ops.h"
#include "tree/moves.h"

namespace kdtree::cpu {

void commit_kv(const kdtree_commit_kv_params &p) {
  const int64_t row_bytes = p.row_elements * p.element_size;
  const int page_shift = tree::page_shift(p);
  // Requests outside, so that a range of work plans each of its requests once.
  parallel_for(
      p.batch * p.num_layers, 1 + (int64_t(1) << 16) / row_bytes, [&](int64_t begin, int64_t end) {
        std::vector<char> rows(p.qlen * row_bytes);
        tree::Move live[tree::kMaxQlen];
        int num_live = 0;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t b = i / p.num_layers;
          if (i == begin || i % p.num_layers == 0) {
            const int32_t *slots = p.accept_index + b * p.accept_index_stride_b;
            const int32_t prefix = p.cache_loc == nullptr ? p.prefix_lens[b] : 0;
            const int count = tree::count_moves(p, p.accept_token_num[b]);
            const auto row_of = [&](int slot) {
              return tree::slot_row(p, page_shift, b, prefix, slot);
            };
            num_live = 0;
            for (int m = 0; m < count; ++m) {
              const tree::Move move = {row_of(slots[m]), row_of(m)};
              if (tree::is_live(move, num_live > 0)) live[num_live++] = move;
            }
          }
          char *cache = static_cast<char *>(p.kv_caches[i % p.num_layers]);
          for (int m = 0; m < num_live; ++m)
            std::memcpy(&rows[m * row_bytes], cache + live[m].from * p.element_size, row_bytes);
          for (int m = 0; m < num_live; ++m)
            std::memcpy(cache + live[m].to * p.element_size, &rows[m * row_bytes], row_bytes);
        }
      });
}

}  // namespace kdtree::cpu
