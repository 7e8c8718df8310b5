// The decoder for AVX2 with FMA.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "decoder.h"
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "vector_avx2.h"
#include "multiply.inl"
#include "decoder.inl"
}
const Level level_avx2 = {avx2::shared_bytes, avx2::private_bytes, avx2::forward, avx2::multiply, avx2::multiply_bytes, avx2::make_ready};
