// How many row tiles and key splits a call is cut into. The host knows no lengths, so this follows
// from the shape alone; each block then takes its share of its own request's keys.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kdtree::cuda::attention {

struct Schedule {
  int rows, tile_rows, tiles, splits;
  int64_t workspace_bytes;
  double cost;  // of a typical call, in keys of a block; not where pinned
};

// A row of 512 floats and its lse, as partial result.
constexpr int64_t kPartialBytes = 513 * 4;

inline int64_t round_up(int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// tile_rows: rows of a block; blocks_per_sm: how many of them an SM runs at once.
inline Schedule schedule(int64_t batch, int64_t qlen, int64_t heads, bool pinned, int tile_rows,
                         int blocks_per_sm, int num_sms) {
  const int64_t rows = qlen * heads;
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  int64_t splits = 1;
  double best = 0;
  if (pinned) {
    // 2,048 rows in flight a request, whatever the batch: its bits depend on nothing else.
    splits = std::clamp<int64_t>((2048 + rows - 1) / rows, 1, 64);
  } else {
    // A block costs its keys and a fixed part (prologue, epilogue, partial results) that is worth
    // kBlockKeys keys; blocks run in waves. Take the cheapest split of a typical request, as long
    // as partial results stay within 256 rows an SM (0.5 MB).
    constexpr double kTypicalKeys = 8192, kBlockKeys = 256;
    const int64_t at_once = int64_t(num_sms) * blocks_per_sm;
    for (int64_t s = 1; s == 1 || (s <= at_once && batch * rows * s <= 256 * num_sms); ++s) {
      const int64_t waves = (batch * tiles * s + at_once - 1) / at_once;
      const double cost = waves * (kTypicalKeys / s + (s > 1 ? kBlockKeys : kBlockKeys / 4));
      if (s == 1 || cost < best) best = cost, splits = s;
    }
  }
  return {static_cast<int>(rows),
          tile_rows,
          static_cast<int>(tiles),
          static_cast<int>(splits),
          splits > 1 ? round_up(batch * rows * splits * kPartialBytes) : 0,
          best};
}

// A plan cuts the keys of the whole batch, one request after the other, into equal parts; a tile's
// parts run side by side with those of the other tiles, at the same keys. Requests that a plan is
// made for at most: every block goes through their lengths.
constexpr int64_t kMaxPlanned = 1024;
constexpr int kPieceBlocks = 3;  // of 64 keys: what a piece of a request costs besides its keys

// Parts of the plan, or 0 where splits are as good: a key costs a planned kernel kPlannedKey.
inline int plan_parts(const Schedule &s, int64_t batch, int num_sms) {
  constexpr double kTypicalBlocks = 8192 / 64, kPlannedKey = 1.1;
  double best = s.cost / 64 / kPlannedKey;
  int parts = 0;
  for (int p = 1; p == 1 || p * s.tiles <= 2 * num_sms; ++p) {
    const int waves = (p * s.tiles + num_sms - 1) / num_sms;
    const double cost =
        waves * (batch * kTypicalBlocks / p + kPieceBlocks * (1 + (batch - 1.0) / p));
    if (cost < best) best = cost, parts = p;
  }
  return parts;
}

}  // namespace kdtree::cuda::attention
