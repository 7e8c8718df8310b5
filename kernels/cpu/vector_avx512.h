// Sixteen lanes: AVX-512 F.
struct V {
    typedef __m512 f;
    typedef __m512i i;
    static constexpr int LANES = 16;
    static inline f load(const float* p) { return _mm512_loadu_ps(p); }
    static inline void store(float* p, f a) { _mm512_storeu_ps(p, a); }
    static inline f all(float a) { return _mm512_set1_ps(a); }
    static inline f zero() { return _mm512_setzero_ps(); }
    static inline f fma(f a, f b, f c) { return _mm512_fmadd_ps(a, b, c); }
    static inline f fnma(f a, f b, f c) { return _mm512_fnmadd_ps(a, b, c); }
    static inline f mul(f a, f b) { return _mm512_mul_ps(a, b); }
    static inline f add(f a, f b) { return _mm512_add_ps(a, b); }
    static inline f sub(f a, f b) { return _mm512_sub_ps(a, b); }
    static inline f div(f a, f b) { return _mm512_div_ps(a, b); }
    static inline f max(f a, f b) { return _mm512_max_ps(a, b); }
    static inline f min(f a, f b) { return _mm512_min_ps(a, b); }
    static inline f round(f a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static inline i words(const void* p) { return _mm512_loadu_si512(p); }
    static inline i all_words(uint32_t a) { return _mm512_set1_epi32((int)a); }
    static inline i both(i a, i b) { return _mm512_and_si512(a, b); }
    static inline i plus(i a, i b) { return _mm512_add_epi32(a, b); }
    template <int N> static inline i right(i a) { return _mm512_srli_epi32(a, N); }
    template <int N> static inline i left(i a) { return _mm512_slli_epi32(a, N); }
    static inline f to_float(i a) { return _mm512_cvtepi32_ps(a); }
    static inline i to_words(f a) { return _mm512_cvtps_epi32(a); }
    static inline f as_float(i a) { return _mm512_castsi512_ps(a); }
    static inline i signed_bytes(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
    static inline i unsigned_bytes(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
    static inline i halves(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
    typedef f table;
    static inline table table_of(const float* p) { return load(p); }
    template <int J> static inline f look_up(const table& t, i word) { return _mm512_permutexvar_ps(right<4 * J>(word), t); }  // reads four bits
    static inline f kept(f a) {  // in a register, not loaded again at each use
        asm("" : "+v"(a));
        return a;
    }
    static inline float sum(f a) { return _mm512_reduce_add_ps(a); }
};
