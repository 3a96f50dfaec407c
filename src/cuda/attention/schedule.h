// How many row tiles and key splits a call is cut into. The host knows no lengths, so this follows
// from the shape alone; each block then takes its share of its own request's keys, or a piece of a
// plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/attention/params.h"

namespace kdtree::cuda::attention {

constexpr float kFewRowsLoad = 0.6f;  // what a tile of few rows costs, in whole ones

struct Schedule {
  int rows, tile_rows, tiles, splits;
  int at_once;                        // blocks that the GPU runs
  int parts, max_pieces, max_merges;  // of a plan; 0 where there is none
  int64_t places;                     // of partial results
  int few_rows;                       // of the last tile, where it is of the kind for few; else 0

  // Of all tiles, in whole ones.
  float load() const { return few_rows > 0 ? tiles - 1 + kFewRowsLoad : tiles; }
  static int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }
  int64_t plan_bytes() const {
    return round_up(max_pieces * int64_t(sizeof(Piece)) + max_merges * int64_t(sizeof(Merge)));
  }
  // Plan, and of each row and place 512 floats and an lse.
  int64_t workspace_bytes() const { return plan_bytes() + round_up(places * rows * 513 * 4); }
};

constexpr int kPieceBlocks = 3;   // of 64 keys: what a piece costs besides its own
constexpr int kMaxPlanned = 512;  // requests
constexpr int kMaxParts = 256;

// tile_rows: rows of a block; blocks_per_sm: how many of them an SM runs at once.
inline Schedule schedule(int64_t batch, int64_t qlen, int64_t heads, bool pinned, int tile_rows,
                         int blocks_per_sm, int num_sms) {
  const int64_t rows = qlen * heads;
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  const int64_t at_once = int64_t(num_sms) * blocks_per_sm;
  int64_t splits = 1;
  if (pinned) {
    // 2,048 rows in flight a request, whatever the batch: its bits depend on nothing else.
    splits = std::clamp<int64_t>((2048 + rows - 1) / rows, 1, 64);
  } else {
    // A block costs its keys and a fixed part (prologue, epilogue, partial results) that is worth
    // kBlockKeys keys; blocks run in waves. Take the cheapest split of a typical request, as long
    // as partial results stay within 256 rows an SM (0.5 MB).
    constexpr double kTypicalKeys = 8192, kBlockKeys = 256;
    double best = 0;
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
          static_cast<int>(at_once),
          0,
          0,
          0,
          splits > 1 ? batch * splits : 0,
          0};
}

// A plan in place of splits: in at most so many parts that the tiles of all fill the GPU twice.
inline Schedule planned(Schedule s, int64_t batch) {
  s.parts = std::clamp(static_cast<int>(2 * s.at_once / s.load()), 1, kMaxParts);
  s.max_pieces = static_cast<int>(batch) + s.parts - 1;
  s.max_merges = std::min(static_cast<int>(batch), s.parts - 1);
  s.places = 2 * (s.parts - 1);
  return s;
}

}  // namespace kdtree::cuda::attention
