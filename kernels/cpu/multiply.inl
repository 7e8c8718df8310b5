// Panels of W x for several rows of x at once. Every output is one chain of fused multiply-adds over the columns in order, whatever the number of rows
// and however they are blocked, so a row's result has the same bits alone, beside others, and in a long prefill.
//
// Weights are unpacked in registers, each time they are used: with a few rows at once that costs nothing, since the multipliers are busy meanwhile.
// Codes are not scaled one by one: for each group,  y += scale * (sum of code * x) - scale * zero * (sum of x).

constexpr int VECTORS = PANEL / V::LANES;
constexpr int ROWS_AT_ONCE = 96;  // rows of x that stay in the cache while panels pass
constexpr int FEW = 2;            // up to so many rows, a whole panel is summed at once, and I4 saves its shifts

// The code that stands for 0, besides a zero point: I4 is stored plus eight.
template <int FORM> static inline float offset() { return FORM == I4 ? 8.0f : 0.0f; }

constexpr bool in_words(int form) { return form == I4 || form == T4; }
constexpr bool in_bytes(int form) { return form == I8 || form == E4M3 || form == E5M2; }

template <int FORM> static inline int64_t bytes_of(int64_t cols) {
    return FORM == F32 ? cols * PANEL * 4 : FORM == BF16 ? cols / 2 * PANEL * 4 : in_bytes(FORM) ? cols * PANEL : cols / 8 * PANEL * 4;
}

static inline V::f bf16(const uint16_t* p) { return V::as_float(V::template left<16>(V::halves(p))); }

// Eight-bit floats: exponent and mantissa shifted to where a float has them, then multiplied by the difference of the exponents' offsets. Exact.
template <int FORM> static inline V::f float8(const char* p) {
    constexpr int shift = FORM == E4M3 ? 20 : 21;
    V::i byte = V::unsigned_bytes(p);
    V::i word = V::plus(V::both(V::template left<24>(byte), V::all_words(0x80000000u)), V::both(V::template left<shift>(byte), V::all_words(0x7fu << shift)));
    return V::mul(V::as_float(word), V::all(FORM == E4M3 ? 0x1p120f : 0x1p112f));
}

static inline V::f scale_at(const Matrix& w, int64_t at) { return w.wide ? V::load((const float*)w.scales + at) : bf16((const uint16_t*)w.scales + at); }

static inline void prefetch(const char* p) { __builtin_prefetch(p + 2048); }

// Columns of I4. With FEW rows: a code in bits 4j.. is code * 16^j as an integer, and x comes multiplied by 16^-j; both are exact and no shift is needed.
template <int J, bool SCALED> static inline V::f nibble(V::i word) {
    if (J == 7) return V::to_float(V::template right<28>(word));
    return V::to_float(SCALED ? V::both(word, V::all_words(15u << (4 * J))) : V::both(V::template right<4 * J>(word), V::all_words(15u)));
}

template <int FORM, int J, int ROWS, int WIDE, bool SCALED>
static inline void nibbles(const V::i* word, const V::table& table, const float* x, int64_t stride, V::f sums[ROWS][WIDE]) {
    V::f code[WIDE];
    for (int v = 0; v < WIDE; v++) code[v] = FORM == T4 ? V::template look_up<J>(table, word[v]) : nibble<J, SCALED>(word[v]);
    for (int r = 0; r < ROWS; r++) {
        V::f each = V::all(x[r * stride + J]);
        for (int v = 0; v < WIDE; v++) sums[r][v] = V::fma(code[v], each, sums[r][v]);
    }
}

// sums += W x over the columns begin .. end of WIDE vectors of a panel, which begins at `panel`.
template <int FORM, int ROWS, int WIDE, bool SCALED>
static inline void columns(const char* panel, const V::table& table, int64_t begin, int64_t end, const float* x, int64_t stride, V::f sums[ROWS][WIDE]) {
    if (in_words(FORM)) {
        for (int64_t k = begin; k < end; k += 8) {
            const char* at = panel + k / 8 * PANEL * 4;
            V::i word[WIDE];
            for (int v = 0; v < WIDE; v++) word[v] = V::words(at + v * V::LANES * 4);
            prefetch(at);
            if (ROWS <= FEW) prefetch(at + 64);
            const float* xk = x + k;
            nibbles<FORM, 0, ROWS, WIDE, SCALED>(word, table, xk, stride, sums), nibbles<FORM, 1, ROWS, WIDE, SCALED>(word, table, xk, stride, sums);
            nibbles<FORM, 2, ROWS, WIDE, SCALED>(word, table, xk, stride, sums), nibbles<FORM, 3, ROWS, WIDE, SCALED>(word, table, xk, stride, sums);
            nibbles<FORM, 4, ROWS, WIDE, SCALED>(word, table, xk, stride, sums), nibbles<FORM, 5, ROWS, WIDE, SCALED>(word, table, xk, stride, sums);
            nibbles<FORM, 6, ROWS, WIDE, SCALED>(word, table, xk, stride, sums), nibbles<FORM, 7, ROWS, WIDE, SCALED>(word, table, xk, stride, sums);
        }
    } else if (FORM == BF16) {
        for (int64_t k = begin; k < end; k += 2) {
            const char* at = panel + k / 2 * PANEL * 4;
            prefetch(at);
            if (ROWS <= FEW) {
                prefetch(at + 64);
                V::f one[ROWS], two[ROWS];
                for (int r = 0; r < ROWS; r++) one[r] = V::all(x[r * stride + k]), two[r] = V::all(x[r * stride + k + 1]);
                for (int v = 0; v < WIDE; v++) {
                    V::i pair = V::words(at + v * V::LANES * 4);
                    V::f even = V::as_float(V::template left<16>(pair)), odd = V::as_float(V::both(pair, V::all_words(0xffff0000u)));
                    for (int r = 0; r < ROWS; r++) sums[r][v] = V::fma(odd, two[r], V::fma(even, one[r], sums[r][v]));
                }
                continue;
            }
            for (int odd = 0; odd < 2; odd++) {  // one after the other: both at once need more registers than there are
                V::f weight[WIDE];
                for (int v = 0; v < WIDE; v++) {
                    V::i pair = V::words(at + v * V::LANES * 4);
                    weight[v] = V::kept(V::as_float(odd ? V::both(pair, V::all_words(0xffff0000u)) : V::template left<16>(pair)));
                }
                for (int r = 0; r < ROWS; r++) {
                    V::f each = V::all(x[r * stride + k + odd]);
                    for (int v = 0; v < WIDE; v++) sums[r][v] = V::fma(weight[v], each, sums[r][v]);
                }
            }
        }
    } else {
        for (int64_t k = begin; k < end; k++) {
            const char* at = panel + (in_bytes(FORM) ? k * PANEL : k * PANEL * 4);
            prefetch(at);
            if (FORM == F32 && ROWS <= FEW) prefetch(at + 64);
            V::f weight[WIDE];
            for (int v = 0; v < WIDE; v++)
                weight[v] = V::kept(FORM == F32  ? V::load((const float*)at + v * V::LANES)
                                    : FORM == I8 ? V::to_float(V::signed_bytes(at + v * V::LANES))
                                                 : float8<FORM>(at + v * V::LANES));
            for (int r = 0; r < ROWS; r++) {
                V::f each = V::all(x[r * stride + k]);
                for (int v = 0; v < WIDE; v++) sums[r][v] = V::fma(weight[v], each, sums[r][v]);
            }
        }
    }
}

// What a thread keeps of its input rows: their sums by group, and for I4 with FEW rows a copy scaled as `nibble` wants it.
struct Input {
    const float* x;
    int64_t rows, stride;
    float* sums;    // [rows][groups]
    float* scaled;  // [FEW][cols]
};

static inline int64_t groups_of(const Matrix& w) { return w.scales ? w.cols / w.group : 1; }

static inline int64_t input_bytes(const Matrix& w, int64_t rows) { return (rows * groups_of(w) + FEW * w.cols) * 4; }

// Whether one prepared input serves both matrices.
static inline bool alike(const Matrix& a, const Matrix& b) { return a.form == b.form && a.cols == b.cols && a.group == b.group && !a.zeros == !b.zeros; }

// `own` has input_bytes().
static Input prepare(const Matrix& w, const float* x, int64_t rows, int64_t stride, char* own) {
    int64_t groups = groups_of(w);
    Input input = {x, rows, stride, (float*)own, (float*)own + rows * groups};
    if (w.form == I4 || w.zeros) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t g = 0; g < groups; g++) {
                const float* from = x + r * stride + g * w.group;
                float total = 0;
                for (int64_t k = 0; k < w.group; k++) total += from[k];
                input.sums[r * groups + g] = total;
            }
    }
    if (w.form == I4 && rows <= FEW) {
        static const float down[8] = {1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1};
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < w.cols; k++) input.scaled[r * w.cols + k] = x[r * stride + k] * down[k & 7];
    }
    return input;
}

// tile [ROWS][PANEL]: panel p times the rows of x from `row` on.
template <int FORM, int ROWS, int WIDE, bool SCALED> static void some_rows(const Matrix& w, int64_t p, const Input& in, int64_t row, float* tile) {
    constexpr bool plain = FORM == F32 || FORM == BF16;
    const char* panel = (const char*)w.data + p * bytes_of<FORM>(w.cols);
    int64_t groups = groups_of(w), group = w.cols / groups, stride = SCALED ? w.cols : in.stride;
    const float *x = SCALED ? in.scaled : in.x + row * in.stride, *totals = in.sums + row * groups;
    V::table table;
    if (FORM == T4) table = V::table_of(w.table);
    for (int from = 0; from < PANEL; from += WIDE * V::LANES) {
        const char* part = panel + from * (in_bytes(FORM) ? 1 : 4);
        for (int64_t g = 0; g < groups; g++) {
            V::f sums[ROWS][WIDE];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < WIDE; v++) sums[r][v] = V::zero();
            columns<FORM, ROWS, WIDE, SCALED>(part, table, g * group, (g + 1) * group, x, stride, sums);
            for (int v = 0; v < WIDE; v++) {
                int64_t lane = from + v * V::LANES, at = (p * groups + g) * PANEL + lane;
                V::f scale = V::zero(), shift = V::zero();
                if (!plain) {
                    V::f zero = V::all(offset<FORM>());
                    if (w.zeros) zero = V::add(zero, V::to_float(V::signed_bytes(w.zeros + at)));
                    scale = scale_at(w, at), shift = V::mul(scale, zero);
                }
                for (int r = 0; r < ROWS; r++) {
                    float* to = tile + r * PANEL + lane;
                    V::f y = sums[r][v];
                    if (!plain) {
                        y = g ? V::fma(scale, y, V::load(to)) : V::mul(scale, y);
                        if (FORM == I4 || w.zeros) y = V::fnma(shift, V::all(totals[r * groups + g]), y);
                    }
                    V::store(to, y);
                }
            }
        }
    }
}

template <int FORM> static void tile_of(const Matrix& w, int64_t p, const Input& in, int64_t row, int64_t rows, float* tile) {
    typedef void (*Some)(const Matrix&, int64_t, const Input&, int64_t, float*);
    static const Some by_count[] = {0, some_rows<FORM, 1, VECTORS, false>, some_rows<FORM, 2, VECTORS, false>, some_rows<FORM, 3, 2, false>,
                                    some_rows<FORM, 4, 2, false>, some_rows<FORM, 5, 2, false>, some_rows<FORM, 6, 2, false>};
    static const Some few[] = {0, some_rows<FORM, 1, VECTORS, FORM == I4>, some_rows<FORM, 2, VECTORS, FORM == I4>};
    for (int64_t done = 0; done < rows;) {
        // As many as fit the registers; what is left over in two halves, since one row alone has too few sums to keep the multipliers busy.
        constexpr int most = in_words(FORM) || FORM == BF16 ? 4 : 6;
        int64_t left = rows - done, many = left >= 2 * most || left == most ? most : left > most ? (left + 1) / 2 : left;
        (in.rows <= FEW ? few : by_count)[many](w, p, in, row + done, tile + done * PANEL);
        done += many;
    }
    if (w.bias)
        for (int64_t r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) {
                float* to = tile + r * PANEL + v * V::LANES;
                V::store(to, V::add(V::load(to), V::load(w.bias + p * PANEL + v * V::LANES)));
            }
}

// tile [rows][PANEL] = outputs of panel p for the rows row .. row + rows of all that `in` holds.
static void make_tile(const Matrix& w, int64_t p, const Input& in, int64_t row, int64_t rows, float* tile) {
    switch (w.form) {
        case F32: return tile_of<F32>(w, p, in, row, rows, tile);
        case BF16: return tile_of<BF16>(w, p, in, row, rows, tile);
        case I8: return tile_of<I8>(w, p, in, row, rows, tile);
        case I4: return tile_of<I4>(w, p, in, row, rows, tile);
        case T4: return tile_of<T4>(w, p, in, row, rows, tile);
        case E4M3: return tile_of<E4M3>(w, p, in, row, rows, tile);
        default: return tile_of<E5M2>(w, p, in, row, rows, tile);
    }
}

// The panels of a stage that thread `rank` of `size` computes.
static inline void share(int64_t panels, const Team* team, int64_t* begin, int64_t* end) {
    *begin = panels * team->rank / team->size;
    *end = panels * (team->rank + 1) / team->size;
}

static inline int64_t panels_of(const Matrix& w) { return (w.rows + PANEL - 1) / PANEL; }
