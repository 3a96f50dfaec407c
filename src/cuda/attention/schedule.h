// How many row tiles and key splits a call is cut into. The host knows no lengths, so this follows
// from the shape alone; each block then takes its share of its own request's keys.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kdtree::cuda::attention {

struct Schedule {
  int rows, tile_rows, tiles, splits;
  int64_t workspace_bytes;
};

// tile_rows: rows of a block; blocks_per_sm: how many of them an SM runs at once.
inline Schedule schedule(int64_t batch, int64_t qlen, int64_t heads, bool pinned, int tile_rows,
                         int blocks_per_sm, int num_sms) {
  const int64_t rows = qlen * heads;
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  int64_t splits = 1;
  if (pinned) {
    // 2,048 rows in flight a request, whatever the batch: its bits depend on nothing else.
    splits = std::clamp<int64_t>((2048 + rows - 1) / rows, 1, 64);
  } else {
    // A block costs its keys and a fixed part (prologue, epilogue, partial results) that is worth
    // kBlockKeys keys; blocks run in waves. Take the cheapest split of a typical request, as long
    // as partial results stay within 256 rows an SM (0.5 MB).
    constexpr double kTypicalKeys = 8192, kBlockKeys = 256;
    const int64_t at_once = int64_t(num_sms) * blocks_per_sm;
    double best = 0;
    for (int64_t s = 1; s == 1 || (s <= at_once && batch * rows * s <= 256 * num_sms); ++s) {
      const int64_t waves = (batch * tiles * s + at_once - 1) / at_once;
      const double cost = waves * (kTypicalKeys / s + (s > 1 ? kBlockKeys : kBlockKeys / 4));
      if (s == 1 || cost < best) best = cost, splits = s;
    }
  }
  // A row of 512 floats and its lse.
  const int64_t bytes = splits > 1 ? batch * rows * splits * 513 * 4 : 0;
  return {static_cast<int>(rows), tile_rows, static_cast<int>(tiles), static_cast<int>(splits),
          (bytes + 255) / 256 * 256};
}

}  // namespace kdtree::cuda::attention
