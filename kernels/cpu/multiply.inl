// Panels of W x for several rows of x at once. Every output is one chain of fused multiply-adds over the columns in order, whatever the number of rows
// and however they are blocked, so a row's result has the same bits alone, beside others, and in a long prefill.
//
// Codes are not scaled one by one: for each group,  y += scale * (sum of code * x) - scale * zero * (sum of x).

constexpr int VECTORS = PANEL / V::LANES, ROWS_AT_ONCE = 96, CHUNK = 128;
static_assert(ROWS_AT_ONCE % V::BLOCK == 0, "whole blocks of rows");

// The code that stands for 0, besides a zero point: I4 is stored plus eight.
template <int FORM> static inline float offset() { return FORM == I4 ? 8.0f : 0.0f; }

template <int FORM> static inline int64_t bytes_of(int64_t cols) {
    return FORM == F32 ? cols * PANEL * 4 : FORM == BF16 ? cols / 2 * PANEL * 4 : FORM == I8 ? cols * PANEL : cols / 8 * PANEL * 4;
}

static inline V::f bf16(const uint16_t* p) { return V::as_float(V::template left<16>(V::halves(p))); }

// y += scale * sums - scale * zero * total, for one vector of outputs.
template <int FORM> static inline V::f scaled(const Matrix& w, int64_t at, V::f sums, V::f y, float total) {
    if (FORM == F32 || FORM == BF16) return sums;
    V::f scale = bf16(w.scales + at);
    y = V::fma(scale, sums, y);
    if (FORM == I4 || w.zeros) {
        V::f zero = V::all(offset<FORM>());
        if (w.zeros) zero = V::add(zero, V::to_float(V::signed_bytes(w.zeros + at)));
        y = V::fnma(V::mul(scale, zero), V::all(total), y);
    }
    return y;
}

// Eight columns of I4 without a shift: a code in bits 4j.. is code * 16^j as an integer, and x comes multiplied by 16^-j; both are exact.
template <int J> static inline V::f nibble(V::i word) {
    return V::to_float(J == 7 ? V::template right<28>(word) : V::both(word, V::all_words(15u << (4 * J))));
}

template <int J, int ROWS> static inline void nibbles(const V::i* word, const float* x, int64_t stride, V::f sums[ROWS][VECTORS]) {
    V::f each[ROWS];
    for (int r = 0; r < ROWS; r++) each[r] = V::all(x[r * stride + J]);
    for (int v = 0; v < VECTORS; v++) {
        V::f code = nibble<J>(word[v]);
        for (int r = 0; r < ROWS; r++) sums[r][v] = V::fma(code, each[r], sums[r][v]);
    }
}

static inline void prefetch(const char* p) { __builtin_prefetch(p + 2048); }

// sums += W x over the columns begin .. end of one panel, straight from the stored form. x: of I4, the scaled copy.
template <int FORM, int ROWS>
static inline void direct(const char* panel, int64_t begin, int64_t end, const float* x, int64_t stride, V::f sums[ROWS][VECTORS]) {
    if (FORM == I4) {
        for (int64_t k = begin; k < end; k += 8) {
            const char* at = panel + k / 8 * PANEL * 4;
            prefetch(at), prefetch(at + 64);
            V::i word[VECTORS];
            for (int v = 0; v < VECTORS; v++) word[v] = V::words(at + v * V::LANES * 4);
            const float* xk = x + k;
            nibbles<0, ROWS>(word, xk, stride, sums), nibbles<1, ROWS>(word, xk, stride, sums);
            nibbles<2, ROWS>(word, xk, stride, sums), nibbles<3, ROWS>(word, xk, stride, sums);
            nibbles<4, ROWS>(word, xk, stride, sums), nibbles<5, ROWS>(word, xk, stride, sums);
            nibbles<6, ROWS>(word, xk, stride, sums), nibbles<7, ROWS>(word, xk, stride, sums);
        }
        return;
    }
    for (int64_t k = begin; k < end; k += FORM == BF16 ? 2 : 1) {
        V::f each[2][ROWS];
        for (int r = 0; r < ROWS; r++) {
            each[0][r] = V::all(x[r * stride + k]);
            if (FORM == BF16) each[1][r] = V::all(x[r * stride + k + 1]);
        }
        const char* at = panel + (FORM == I8 ? k * PANEL : FORM == F32 ? k * PANEL * 4 : k / 2 * PANEL * 4);
        prefetch(at);
        if (FORM != I8) prefetch(at + 64);
        for (int v = 0; v < VECTORS; v++) {
            if (FORM == BF16) {
                V::i pair = V::words(at + v * V::LANES * 4);
                V::f even = V::as_float(V::template left<16>(pair)), odd = V::as_float(V::both(pair, V::all_words(0xffff0000u)));
                for (int r = 0; r < ROWS; r++) sums[r][v] = V::fma(odd, each[1][r], V::fma(even, each[0][r], sums[r][v]));
            } else {
                V::f weight = FORM == F32 ? V::load((const float*)at + v * V::LANES) : V::to_float(V::signed_bytes(at + v * V::LANES));
                for (int r = 0; r < ROWS; r++) sums[r][v] = V::fma(weight, each[0][r], sums[r][v]);
            }
        }
    }
}

// The columns begin .. end of a panel as floats [columns][PANEL]: codes, or the weights themselves.
template <int FORM> static void unpack(const char* panel, int64_t begin, int64_t end, float* out) {
    if (FORM == I4) {
        for (int64_t k = begin; k < end; k += 8, out += 8 * PANEL) {
            for (int v = 0; v < VECTORS; v++) {
                V::i word = V::words(panel + k / 8 * PANEL * 4 + v * V::LANES * 4);
                for (int j = 0; j < 8; j++) {
                    V::store(out + j * PANEL + v * V::LANES, V::to_float(V::both(word, V::all_words(15))));
                    word = V::template right<4>(word);
                }
            }
        }
    } else if (FORM == BF16) {
        for (int64_t k = begin; k < end; k += 2, out += 2 * PANEL) {
            for (int v = 0; v < VECTORS; v++) {
                V::i pair = V::words(panel + k / 2 * PANEL * 4 + v * V::LANES * 4);
                V::store(out + v * V::LANES, V::as_float(V::template left<16>(pair)));
                V::store(out + PANEL + v * V::LANES, V::as_float(V::both(pair, V::all_words(0xffff0000u))));
            }
        }
    } else {
        for (int64_t k = begin; k < end; k++, out += PANEL)
            for (int v = 0; v < VECTORS; v++) V::store(out + v * V::LANES, V::to_float(V::signed_bytes(panel + k * PANEL + v * V::LANES)));
    }
}

template <int ROWS> static inline void block(const float* weights, int64_t count, const float* x, int64_t stride, V::f sums[ROWS][VECTORS]) {
    for (int64_t k = 0; k < count; k++) {
        V::f weight[VECTORS];
        for (int v = 0; v < VECTORS; v++) weight[v] = V::load(weights + k * PANEL + v * V::LANES);
        for (int r = 0; r < ROWS; r++) {
            V::f each = V::all(x[r * stride + k]);
            for (int v = 0; v < VECTORS; v++) sums[r][v] = V::fma(weight[v], each, sums[r][v]);
        }
    }
}

// What a thread keeps of its input rows: their sums by group, and for I4 a copy scaled as `nibble` wants it.
struct Input {
    const float* x;
    int64_t stride;
    float* sums;    // [rows][groups]
    float* scaled;  // [rows][cols] of the first DIRECT rows
};

constexpr int DIRECT = 2;  // rows up to which codes are used as they are read; above, a panel is unpacked once for all rows

static inline int64_t groups_of(const Matrix& w) { return w.scales ? w.cols / w.group : 1; }

static inline int64_t input_bytes(const Matrix& w, int64_t rows) { return (rows * groups_of(w) + DIRECT * w.cols) * 4; }

// `own` has input_bytes(). The same for all matrices of one form, columns and group that read x.
static Input prepare(const Matrix& w, const float* x, int64_t rows, int64_t stride, char* own) {
    int64_t groups = groups_of(w);
    Input input = {x, stride, (float*)own, (float*)own + rows * groups};
    if (w.form == I4 || w.zeros) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t g = 0; g < groups; g++) {
                const float* from = x + r * stride + g * w.group;
                float total = 0;
                for (int64_t k = 0; k < w.group; k++) total += from[k];
                input.sums[r * groups + g] = total;
            }
    }
    if (w.form == I4 && rows <= DIRECT) {
        static const float down[8] = {1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1};
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < w.cols; k++) input.scaled[r * w.cols + k] = x[r * stride + k] * down[k & 7];
    }
    return input;
}

// tile [ROWS][PANEL] of one panel, from the stored form.
template <int FORM, int ROWS> static void tile_direct(const Matrix& w, int64_t p, const Input& in, float* tile) {
    const char* panel = (const char*)w.data + p * bytes_of<FORM>(w.cols);
    int64_t groups = groups_of(w), group = w.cols / groups, stride = FORM == I4 ? w.cols : in.stride;
    const float* x = FORM == I4 ? in.scaled : in.x;
    V::f y[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) y[r][v] = V::zero();
    for (int64_t g = 0; g < groups; g++) {
        V::f sums[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] = V::zero();
        direct<FORM, ROWS>(panel, g * group, (g + 1) * group, x, stride, sums);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                y[r][v] = scaled<FORM>(w, (p * groups + g) * PANEL + v * V::LANES, sums[r][v], y[r][v], in.sums[r * groups + g]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) V::store(tile + r * PANEL + v * V::LANES, y[r][v]);
}

template <int FORM, int ROWS>
static inline void rows_of_tile(const Matrix& w, int64_t at, const float* weights, int64_t count, const float* x, int64_t stride, bool first, bool last,
                                const float* totals, int64_t groups, float* partial, float* tile) {
    V::f sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = first ? V::zero() : V::load(partial + r * PANEL + v * V::LANES);
    block<ROWS>(weights, count, x, stride, sums);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            float* to = (last ? tile : partial) + r * PANEL + v * V::LANES;
            V::store(to, last ? scaled<FORM>(w, at + v * V::LANES, sums[r][v], V::load(to), totals[r * groups]) : sums[r][v]);
        }
}

// tile [rows][PANEL] of one panel for up to ROWS_AT_ONCE rows from `row` on, through an unpacked chunk. `own` has tile_bytes.
constexpr int TILE_BYTES = (CHUNK + ROWS_AT_ONCE) * PANEL * 4;

template <int FORM> static void tile_unpacked(const Matrix& w, int64_t p, const Input& in, int64_t row, int64_t rows, char* own, float* tile) {
    float *chunk = (float*)own, *partial = chunk + CHUNK * PANEL;
    const char* panel = (const char*)w.data + p * bytes_of<FORM>(w.cols);
    int64_t groups = groups_of(w), group = w.cols / groups;
    memset(tile, 0, rows * PANEL * 4);
    for (int64_t g = 0; g < groups; g++) {
        int64_t begin = g * group, end = begin + group;
        for (int64_t k = begin; k < end; k += CHUNK) {
            int64_t count = end - k < CHUNK ? end - k : CHUNK;
            const float* weights = FORM == F32 ? (const float*)panel + k * PANEL : chunk;
            if (FORM != F32) unpack<FORM>(panel, k, k + count, chunk);
            bool first = k == begin, last = k + count == end;
            int64_t r = 0, at = (p * groups + g) * PANEL;
            const float *x = in.x + row * in.stride + k, *totals = in.sums + row * groups + g;
            for (; r + V::BLOCK <= rows; r += V::BLOCK)
                rows_of_tile<FORM, V::BLOCK>(w, at, weights, count, x + r * in.stride, in.stride, first, last, totals + r * groups, groups,
                                             partial + r * PANEL, tile + r * PANEL);
            for (; r < rows; r++)
                rows_of_tile<FORM, 1>(w, at, weights, count, x + r * in.stride, in.stride, first, last, totals + r * groups, groups,
                                      partial + r * PANEL, tile + r * PANEL);
        }
    }
}

template <int FORM> static void tile_form(const Matrix& w, int64_t p, const Input& in, int64_t row, int64_t rows, bool few, char* own, float* tile) {
    if (few && rows == 1) tile_direct<FORM, 1>(w, p, in, tile);
    else if (few) tile_direct<FORM, 2>(w, p, in, tile);
    else tile_unpacked<FORM>(w, p, in, row, rows, own, tile);
    if (w.bias)
        for (int64_t r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) {
                float* to = tile + r * PANEL + v * V::LANES;
                V::store(to, V::add(V::load(to), V::load(w.bias + p * PANEL + v * V::LANES)));
            }
}

// tile [rows][PANEL] = outputs of panel p for the rows row .. row + rows of `total`.
static void make_tile(const Matrix& w, int64_t p, const Input& in, int64_t row, int64_t rows, int64_t total, char* own, float* tile) {
    bool few = total <= DIRECT;
    switch (w.form) {
        case F32: return tile_form<F32>(w, p, in, row, rows, few, own, tile);
        case BF16: return tile_form<BF16>(w, p, in, row, rows, few, own, tile);
        case I8: return tile_form<I8>(w, p, in, row, rows, few, own, tile);
        default: return tile_form<I4>(w, p, in, row, rows, few, own, tile);
    }
}

// The panels of a stage that thread `rank` of `size` computes.
static inline void share(int64_t panels, const Team* team, int64_t* begin, int64_t* end) {
    *begin = panels * team->rank / team->size;
    *end = panels * (team->rank + 1) / team->size;
}

static inline int64_t panels_of(const Matrix& w) { return (w.rows + PANEL - 1) / PANEL; }
