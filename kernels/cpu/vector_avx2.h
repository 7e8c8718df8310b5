// Eight lanes: AVX2 with FMA.
struct V {
    typedef __m256 f;
    typedef __m256i i;
    static constexpr int LANES = 8;
    static inline f load(const float* p) { return _mm256_loadu_ps(p); }
    static inline void store(float* p, f a) { _mm256_storeu_ps(p, a); }
    static inline f all(float a) { return _mm256_set1_ps(a); }
    static inline f zero() { return _mm256_setzero_ps(); }
    static inline f fma(f a, f b, f c) { return _mm256_fmadd_ps(a, b, c); }
    static inline f fnma(f a, f b, f c) { return _mm256_fnmadd_ps(a, b, c); }
    static inline f mul(f a, f b) { return _mm256_mul_ps(a, b); }
    static inline f add(f a, f b) { return _mm256_add_ps(a, b); }
    static inline f sub(f a, f b) { return _mm256_sub_ps(a, b); }
    static inline f div(f a, f b) { return _mm256_div_ps(a, b); }
    static inline f max(f a, f b) { return _mm256_max_ps(a, b); }
    static inline f min(f a, f b) { return _mm256_min_ps(a, b); }
    static inline f round(f a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static inline i words(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static inline i all_words(uint32_t a) { return _mm256_set1_epi32((int)a); }
    static inline i both(i a, i b) { return _mm256_and_si256(a, b); }
    static inline i plus(i a, i b) { return _mm256_add_epi32(a, b); }
    template <int N> static inline i right(i a) { return _mm256_srli_epi32(a, N); }
    template <int N> static inline i left(i a) { return _mm256_slli_epi32(a, N); }
    static inline f to_float(i a) { return _mm256_cvtepi32_ps(a); }
    static inline i to_words(f a) { return _mm256_cvtps_epi32(a); }
    static inline f as_float(i a) { return _mm256_castsi256_ps(a); }
    static inline i signed_bytes(const void* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
    static inline i unsigned_bytes(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
    static inline i halves(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
    struct table {
        f low, high;
    };
    static inline table table_of(const float* p) { return {load(p), load(p + 8)}; }
    template <int J> static inline f look_up(const table& t, i word) {  // by bits 4J ... 4J + 3; a permutation reads the lowest three of its index
        i at = right<4 * J>(word);
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, at), _mm256_permutevar8x32_ps(t.high, at), as_float(left<28 - 4 * J>(word)));
    }
    static inline f kept(f a) {  // in a register, not loaded again at each use
        asm("" : "+x"(a));
        return a;
    }
    static inline float sum(f a) {
        __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        b = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
    }
};
