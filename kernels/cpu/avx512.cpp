// The decoder for AVX-512 F.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "decoder.h"
#pragma GCC target("avx512f,avx2,fma")
namespace avx512 {
#include "vector_avx512.h"
#include "multiply.inl"
#include "decoder.inl"
}
const Level level_avx512 = {avx512::shared_bytes, avx512::private_bytes, avx512::forward, avx512::multiply, avx512::multiply_bytes, avx512::make_ready};
