// Names and sizes of kdtree_dtype, for the checks of the C ABI and of the Python binding.
#pragma once

#include "kdtree.h"

namespace kdtree {

// NumPy's name (ml_dtypes' for the last two kinds); nullptr for a number that is no kdtree_dtype.
inline const char *dtype_name(int32_t dtype) {
  switch (dtype) {
    case KDTREE_I32: return "int32";
    case KDTREE_I64: return "int64";
    case KDTREE_F16: return "float16";
    case KDTREE_F32: return "float32";
    case KDTREE_BF16: return "bfloat16";
    case KDTREE_F8E4M3: return "float8_e4m3fn";
  }
  return nullptr;
}

// In bytes; 0 for a number that is no kdtree_dtype.
inline int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case KDTREE_I64: return 8;
    case KDTREE_I32:
    case KDTREE_F32: return 4;
    case KDTREE_F16:
    case KDTREE_BF16: return 2;
    case KDTREE_F8E4M3: return 1;
  }
  return 0;
}

}  // namespace kdtree
