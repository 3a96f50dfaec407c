// Errors inside the library: thrown anywhere below the C ABI, turned into a status at it.
#pragma once

#include <string>
#include <utility>

#include "kdtree.h"

namespace kdtree {

struct Error {
  kdtree_status status;
  std::string message;
};

// The message names the argument, what was expected and what came:
//   throw ValueError("k: expected 1..64, got " + std::to_string(k))
inline Error ValueError(std::string message) {
  return {KDTREE_ERROR_VALUE, std::move(message)};
}
inline Error TypeError(std::string message) {
  return {KDTREE_ERROR_TYPE, std::move(message)};
}

}  // namespace kdtree
