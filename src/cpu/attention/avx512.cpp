// Sixteen lanes and 32 registers. Compiled with -mavx512f -mfma; run only where the CPU has both.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__FMA__)
#error "this file needs -mavx512f -mfma"
#endif
#define KDTREE_KERNELS avx512
#define KDTREE_LANES 16
#define KDTREE_SCORE_VECTORS 3
#define KDTREE_SCORE_KEYS 8
#define KDTREE_VALUE_ROWS 6
#define KDTREE_VALUE_VECTORS 4
#include "cpu/attention/kernels.inc.h"
#endif
