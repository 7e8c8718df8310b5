// One step of the decoder, run by every thread of a team at once; a barrier stands wherever a thread reads what another wrote.
//
// All arithmetic is float32, and each token's is done in an order that does not depend on the other tokens of the step: a text has the same logits, bit
// for bit, alone or in a batch, token by token or in chunks.

static inline V::f exponential(V::f x) {
    x = V::min(V::all(88.0f), V::max(V::all(-87.0f), x));  // in this order NaN stays NaN
    V::f n = V::round(V::mul(x, V::all(1.44269504f)));
    V::f r = V::fnma(n, V::all(-2.12194440e-4f), V::fnma(n, V::all(0.693359375f), x));
    V::f y = V::all(1.9875691500e-4f);
    const float rest[5] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (int j = 0; j < 5; j++) y = V::fma(y, r, V::all(rest[j]));
    y = V::add(V::fma(V::mul(y, r), r, r), V::all(1.0f));
    return V::mul(y, V::as_float(V::template left<23>(V::plus(V::to_words(n), V::all_words(127)))));
}

// activation(gate) * up
static inline V::f glu(V::f gate, V::f up, bool gelu) {
    V::f one = V::all(1.0f), x = gate;
    if (gelu) {  // gate * (1 + tanh u) / 2 = gate / (1 + exp(-2u))
        V::f cube = V::mul(V::mul(gate, gate), gate);
        x = V::mul(V::all(1.5957691216f), V::fma(cube, V::all(0.044715f), gate));
    }
    return V::mul(V::div(gate, V::add(one, exponential(V::sub(V::zero(), x)))), up);
}

static float square_sum(const float* x, int64_t n) {
    V::f total = V::zero();
    int64_t k = 0;
    for (; k + V::LANES <= n; k += V::LANES) total = V::fma(V::load(x + k), V::load(x + k), total);
    float sum = V::sum(total);
    for (; k < n; k++) sum += x[k] * x[k];
    return sum;
}

static void normalise(const float* x, const float* weight, int64_t n, float eps, float plus, float* out) {
    float scale = 1.0f / __builtin_sqrtf(square_sum(x, n) / (float)n + eps);
    for (int64_t k = 0; k < n; k++) out[k] = x[k] * scale * (plus + weight[k]);
}

static inline float from_bf16(uint16_t half) {
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
static inline uint16_t to_bf16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if ((word & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(word >> 16 | 0x40);
    return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

static inline float from_e4m3(uint8_t byte) {
    if ((byte & 0x7f) == 0x7f) return __builtin_nanf("");
    uint32_t word = (uint32_t)(byte & 0x7f) << 20;
    float value;
    memcpy(&value, &word, 4);
    value *= 0x1p120f;
    return byte & 0x80 ? -value : value;
}

// Saturating at 448, ties to even; NaN stays NaN.
static inline uint8_t to_e4m3(float value) {
    uint8_t sign = __builtin_signbit(value) ? 0x80 : 0;
    float size = __builtin_fabsf(value);
    if (size != size) return sign | 0x7f;
    if (size >= 448.0f) return sign | 0x7e;
    if (size < 0x1p-6f) return sign | (uint8_t)__builtin_rintf(size * 0x1p9f);  // steps of 2^-9; 8 of them are the least normal number
    uint32_t word;
    memcpy(&word, &size, 4);
    word += 0x7ffff + ((word >> 20) & 1);
    return sign | (uint8_t)((word >> 20) - (120 << 3));
}

static inline int64_t cache_row(const Model* m, const Cache* c, int64_t layer, int64_t row, int64_t head) {
    return ((layer * c->rows + row) * m->kv_heads + head) * c->capacity;
}

static void store_row(const Cache* c, void* to, uint16_t* scales, int64_t at, const float* x, int64_t width) {
    if (c->store == STORE_F32) {
        memcpy((float*)to + at * width, x, width * 4);
    } else if (c->store == STORE_E4M3) {
        for (int64_t k = 0; k < width; k++) ((uint8_t*)to)[at * width + k] = to_e4m3(x[k]);
    } else {  // as ops/kv/cache.py: the scale is rounded to bfloat16 first, a row of zeros has the smallest; NaN makes the scale NaN
        float most = 0;
        bool nan = false;
        for (int64_t k = 0; k < width; k++) {
            float size = __builtin_fabsf(x[k]);
            nan |= size != size;
            if (size > most) most = size;
        }
        uint16_t half = nan ? 0x7fc0 : to_bf16(most / 127.0f);
        if (half < 0x0080) half = 0x0080;
        float scale = from_bf16(half);
        scales[at] = half;
        for (int64_t k = 0; k < width; k++) {
            float code = __builtin_rintf(x[k] / scale);
            code = code > 127 ? 127 : code < -127 ? -127 : code;
            ((int8_t*)to)[at * width + k] = code == code ? (int8_t)code : 0;
        }
    }
}

// `count` rows as floats: in place where they are stored so, else into `own`.
static const float* load_rows(const Cache* c, const void* from, const uint16_t* scales, int64_t at, int64_t count, int64_t width, float* own) {
    if (c->store == STORE_F32) return (const float*)from + at * width;
    for (int64_t r = 0; r < count; r++)
        for (int64_t k = 0; k < width; k++) {
            int64_t index = (at + r) * width + k;
            own[r * width + k] =
                c->store == STORE_E4M3 ? from_e4m3(((const uint8_t*)from)[index]) : (float)((const int8_t*)from)[index] * from_bf16(scales[at + r]);
        }
    return own;
}

static void rotate(float* x, const float* cosine, const float* sine, int64_t half) {
    for (int64_t k = 0; k < half; k++) {
        float a = x[k], b = x[k + half];
        x[k] = a * cosine[k] - b * sine[k];
        x[k + half] = b * cosine[k] + a * sine[k];
    }
}

static float inner(const float* a, const float* b, int64_t n) {
    V::f total = V::zero();
    int64_t k = 0;
    for (; k + V::LANES <= n; k += V::LANES) total = V::fma(V::load(a + k), V::load(b + k), total);
    float sum = V::sum(total);
    for (; k < n; k++) sum += a[k] * b[k];
    return sum;
}

// out = softmax(scale * q K^T) V over the rows from .. to; scores holds as many numbers.
static void attend(const float* q, const float* keys, const float* values, int64_t from, int64_t to, int64_t width, float scale, float* scores, float* out) {
    float most = -__builtin_inff();
    for (int64_t j = from; j < to; j++) {
        scores[j - from] = inner(q, keys + j * width, width) * scale;
        if (!(scores[j - from] <= most)) most = scores[j - from];
    }
    int64_t count = to - from, j = 0;
    V::f totals = V::zero();
    for (; j + V::LANES <= count; j += V::LANES) {
        V::f weight = exponential(V::sub(V::load(scores + j), V::all(most)));
        V::store(scores + j, weight);
        totals = V::add(totals, weight);
    }
    float total = V::sum(totals), padded[V::LANES];
    if (j < count) {
        for (int k = 0; k < V::LANES; k++) padded[k] = j + k < count ? scores[j + k] - most : -87.0f;
        V::store(padded, exponential(V::load(padded)));
        for (int k = 0; j < count; j++, k++) total += scores[j] = padded[k];
    }
    float over = 1.0f / total;
    int64_t k = 0;
    for (; k + 4 * V::LANES <= width; k += 4 * V::LANES) {
        V::f sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
        for (j = 0; j < count; j++)
            for (int v = 0; v < 4; v++) sums[v] = V::fma(V::all(scores[j]), V::load(values + (from + j) * width + k + v * V::LANES), sums[v]);
        for (int v = 0; v < 4; v++) V::store(out + k + v * V::LANES, V::mul(sums[v], V::all(over)));
    }
    for (; k < width; k++) {
        float sum = 0;
        for (j = 0; j < count; j++) sum = __builtin_fmaf(scores[j], values[(from + j) * width + k], sum);
        out[k] = sum * over;
    }
}

static inline float from_e5m2(uint8_t byte) {
    uint32_t word = (uint32_t)(byte & 0x7f) << 21;
    float value;
    memcpy(&value, &word, 4);
    value *= 0x1p112f;
    return byte & 0x80 ? -value : value;
}

static void gather(const Matrix& w, int64_t id, float scale, float* out) {
    int64_t p = id / PANEL, lane = id % PANEL, groups = groups_of(w);
    for (int64_t k = 0; k < w.cols; k++) {
        float value;
        if (w.form == F32) value = ((const float*)w.data)[(p * w.cols + k) * PANEL + lane];
        else if (w.form == BF16) value = from_bf16((uint16_t)(((const uint32_t*)w.data)[(p * w.cols / 2 + k / 2) * PANEL + lane] >> (k & 1 ? 16 : 0)));
        else {
            int64_t at = (p * groups + k / w.group) * PANEL + lane;
            if (in_words(w.form)) {
                int code = ((const uint32_t*)w.data)[(p * w.cols / 8 + k / 8) * PANEL + lane] >> (4 * (k & 7)) & 15;
                value = w.form == T4 ? w.table[code] : (float)(code - 8);
            } else {
                uint8_t byte = ((const uint8_t*)w.data)[(p * w.cols + k) * PANEL + lane];
                value = w.form == I8 ? (float)(int8_t)byte : w.form == E4M3 ? from_e4m3(byte) : from_e5m2(byte);
            }
            value = (value - (w.zeros ? w.zeros[at] : 0)) * (w.wide ? ((const float*)w.scales)[at] : from_bf16(((const uint16_t*)w.scales)[at]));
        }
        out[k] = value * scale;
    }
}

// x [width] = x times the Kronecker product of the two matrices, in each run of left * right channels that lie `stride` apart; own holds as many floats.
static void turn(const Ready& how, float* x, int64_t width, float* own) {
    int64_t across = how.right * how.stride, run = how.left * across;
    for (int64_t at = 0; at < width; at += run) {
        float* from = x + at;
        if (how.right > 1) {  // stride is 1
            for (int64_t l = 0; l < how.left; l++) {
                float *to = own + l * how.right, *row = from + l * how.right;
                for (int64_t n = 0; n < how.right; n++) to[n] = 0;
                for (int64_t k = 0; k < how.right; k++)
                    for (int64_t n = 0; n < how.right; n++) to[n] += row[k] * how.right_matrix[k * how.right + n];
            }
        } else {
            memcpy(own, from, run * 4);
        }
        for (int64_t l = 0; l < how.left; l++) {
            float* to = from + l * across;
            for (int64_t n = 0; n < across; n++) to[n] = 0;
            for (int64_t k = 0; k < how.left; k++) {
                float weight = how.left_matrix[l * how.left + k];
                for (int64_t n = 0; n < across; n++) to[n] += weight * own[k * across + n];
            }
        }
    }
}

// As ops/quantize/activations.py: a row is rounded to numbers that share a scale; one with a NaN becomes NaN.
static void round_row(const Ready& how, float* x, int64_t width) {
    float least = 0, most = 0, scale = how.scale, zero = how.zero;
    float levels = (float)((1 << how.bits) - 1), half = (float)(1 << (how.bits - 1));
    if (!how.fixed) {
        bool nan = false;
        for (int64_t k = 0; k < width; k++) {
            nan |= x[k] != x[k];
            if (x[k] < least) least = x[k];
            if (x[k] > most) most = x[k];
        }
        least *= how.clip, most *= how.clip;
        float size = -least > most ? -least : most;
        scale = how.rounding == TO_E4M3 ? size / 448.0f : how.symmetric ? size / (levels / 2) : (most - least) / levels;
        if (scale < 0x1p-126f) scale = 0x1p-126f;
        zero = how.rounding == TO_E4M3 || how.symmetric ? 0 : __builtin_rintf(-half - least / scale);
        if (nan) scale = __builtin_nanf("");
    }
    for (int64_t k = 0; k < width; k++) {
        float number = x[k] / scale;
        if (how.rounding == TO_E4M3) {
            x[k] = from_e4m3(to_e4m3(number)) * scale;
            continue;
        }
        number = __builtin_rintf(number) + zero;
        number = number < -half ? -half : number > half - 1 ? half - 1 : number;
        x[k] = (number - zero) * scale;
    }
}

static void make_ready(const Ready& how, float* x, int64_t width, float* own) {
    if (how.left) turn(how, x, width, own);
    if (how.rounding) round_row(how, x, width);
}

static inline void wait(const Team* team) {
    if (team->size > 1) team->barrier(team->state);
}

// to[r][0 .. width of panel) = or += tile; the last panel may be narrower.
static inline void put(const float* tile, int64_t rows, int64_t p, const Matrix& w, bool add, float* to, int64_t stride) {
    int64_t width = w.rows - p * PANEL < PANEL ? w.rows - p * PANEL : PANEL;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < width; n++) {
            float* at = to + r * stride + p * PANEL + n;
            *at = add ? *at + tile[r * PANEL + n] : tile[r * PANEL + n];
        }
}

struct Own {  // a thread's scratch
    char* input;
    float *tile, *other_tile, *scores, *keys, *values, *turned;
};

// The rows of an input that all threads are about to read.
static void make_ready(const Ready& how, float* x, int64_t tokens, int64_t width, const Own& own, const Team* team) {
    if (!how.left && !how.rounding) return;
    for (int64_t t = team->rank; t < tokens; t += team->size) make_ready(how, x + t * width, width, own.turned);
    wait(team);
}

// to (=, or += with add) W x for the matrices of a stage, which read the same x and share its panels among the team.
static void linear(const Matrix* const* matrices, float* const* to, const int64_t* strides, int count, const float* x, int64_t tokens, int64_t stride, bool add,
                   const Own& own, const Team* team) {
    int64_t panels = 0, begin, end;
    for (int i = 0; i < count; i++) panels += panels_of(*matrices[i]);
    share(panels, team, &begin, &end);
    int64_t first = 0;
    const Matrix* prepared = 0;
    Input in;
    for (int i = 0; i < count; first += panels_of(*matrices[i]), i++) {
        const Matrix& w = *matrices[i];
        int64_t from = begin > first ? begin - first : 0, until = end - first < panels_of(w) ? end - first : panels_of(w);
        if (from >= until) continue;
        if (!prepared || !alike(*prepared, w)) in = prepare(w, x, tokens, stride, own.input), prepared = &w;
        for (int64_t row = 0; row < tokens; row += ROWS_AT_ONCE) {
            int64_t rows = tokens - row < ROWS_AT_ONCE ? tokens - row : ROWS_AT_ONCE;
            for (int64_t p = from; p < until; p++) {
                make_tile(w, p, in, row, rows, own.tile);
                put(own.tile, rows, p, w, add, to[i] + row * strides[i], strides[i]);
            }
        }
    }
}

static void gated(const Model* m, const Block& b, const float* x, int64_t tokens, float* h, const Own& own, const Team* team) {
    int64_t begin, end;
    share(panels_of(b.gate), team, &begin, &end);
    Input one = prepare(b.gate, x, tokens, m->hidden, own.input), two = one;
    if (!alike(b.gate, b.up)) two = prepare(b.up, x, tokens, m->hidden, own.input + input_bytes(b.gate, tokens));
    for (int64_t row = 0; row < tokens; row += ROWS_AT_ONCE) {
        int64_t rows = tokens - row < ROWS_AT_ONCE ? tokens - row : ROWS_AT_ONCE;
        for (int64_t p = begin; p < end; p++) {
            make_tile(b.gate, p, one, row, rows, own.tile);
            make_tile(b.up, p, two, row, rows, own.other_tile);
            for (int64_t at = 0; at < rows * PANEL; at += V::LANES)
                V::store(own.tile + at, glu(V::load(own.tile + at), V::load(own.other_tile + at), m->gelu));
            put(own.tile, rows, p, b.gate, false, h + row * m->intermediate, m->intermediate);
        }
    }
}

static const float* normalised(const Model* m, const float* x, const float* weight, const Ready& how, int64_t tokens, float* common, const Own& own, const Team* team) {
    for (int64_t t = team->rank; t < tokens; t += team->size) {
        normalise(x + t * m->hidden, weight, m->hidden, m->norm_eps, m->norm_offset, common + t * m->hidden);
        make_ready(how, common + t * m->hidden, m->hidden, own.turned);
    }
    wait(team);
    return common;
}

static void add_normalised(const Model* m, const float* from, const float* weight, int64_t tokens, float* own, float* x, const Team* team) {
    for (int64_t t = team->rank; t < tokens; t += team->size) {
        normalise(from + t * m->hidden, weight, m->hidden, m->norm_eps, m->norm_offset, own);
        for (int64_t k = 0; k < m->hidden; k++) x[t * m->hidden + k] += own[k];
    }
    wait(team);
}

struct Shared {
    float *x, *normal, *q, *k, *v, *attention, *h, *spare;
};

static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static Shared shared(const Model* m, int64_t tokens, int64_t kept, char* base, int64_t* bytes) {
    Shared s;
    int64_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim, at = 0, most = tokens > kept ? tokens : kept;
    float** parts[8] = {&s.x, &s.normal, &s.q, &s.k, &s.v, &s.attention, &s.h, &s.spare};
    int64_t sizes[8] = {tokens * m->hidden, most * m->hidden, tokens * q, tokens * kv, tokens * kv, tokens * q, tokens * m->intermediate, tokens * m->hidden};
    for (int i = 0; i < 8; i++) *parts[i] = (float*)(base + at), at += round_up(sizes[i] * 4);
    if (bytes) *bytes = at;
    return s;
}

static int64_t widest_input(const Model* m, int64_t tokens) {
    int64_t most = input_bytes(m->head, tokens);
    for (int64_t l = 0; l < m->layers; l++) {
        const Block& b = m->blocks[l];
        const Matrix* all[5] = {&b.q, &b.k, &b.v, &b.o, &b.down};
        for (int i = 0; i < 5; i++)
            if (input_bytes(*all[i], tokens) > most) most = input_bytes(*all[i], tokens);
        int64_t both = input_bytes(b.gate, tokens) + input_bytes(b.up, tokens);
        if (both > most) most = both;
    }
    return most;
}

constexpr int QUERIES = 32;  // consecutive tokens of one text that share what was loaded of its cache

static Own owned(const Model* m, const Cache* c, int64_t tokens, char* base, int64_t* bytes) {
    Own own;
    int64_t at = 0, rows = c->store == STORE_F32 ? 0 : c->capacity;
    int64_t wide = m->hidden > c->capacity ? m->hidden : c->capacity;
    own.input = base, at += round_up(widest_input(m, tokens));
    int64_t widest = m->intermediate > m->hidden ? m->intermediate : m->hidden, heads = m->heads * m->head_dim;
    float** parts[6] = {&own.tile, &own.other_tile, &own.scores, &own.keys, &own.values, &own.turned};
    int64_t sizes[6] = {ROWS_AT_ONCE * PANEL, ROWS_AT_ONCE * PANEL, wide, rows * m->head_dim, rows * m->head_dim, heads > widest ? heads : widest};
    for (int i = 0; i < 6; i++) *parts[i] = (float*)(base + at), at += round_up(sizes[i] * 4);
    if (bytes) *bytes = at;
    return own;
}

static void attention(const Model* m, const Cache* c, const Step* step, int64_t layer, const Shared& s, const Own& own, const Team* team) {
    const Block& b = m->blocks[layer];
    int64_t d = m->head_dim, q = m->heads * d, kv = m->kv_heads * d, half = d / 2, all = m->heads + m->kv_heads;
    for (int64_t unit = team->rank; unit < step->tokens * all; unit += team->size) {
        int64_t t = unit / all, h = unit % all, position = step->positions[t];
        const float *cosine = b.cosine + position * half, *sine = b.sine + position * half;
        bool key = h >= m->heads;
        float* x = key ? s.k + t * kv + (h - m->heads) * d : s.q + t * q + h * d;
        const float* norm = key ? b.k_norm : b.q_norm;
        if (norm) normalise(x, norm, d, m->norm_eps, m->norm_offset, x);
        rotate(x, cosine, sine, half);
        make_ready(b.turned_heads, x, d, own.turned);
        if (key) {
            int64_t at = cache_row(m, c, layer, step->rows[t], h - m->heads) + step->slots[t];
            store_row(c, c->keys, c->key_scales, at, x, d);
            store_row(c, c->values, c->value_scales, at, s.v + t * kv + (h - m->heads) * d, d);
        }
    }
    wait(team);
    int64_t unit = 0, group = m->heads / m->kv_heads;
    for (int64_t t = 0, next; t < step->tokens; t = next) {
        for (next = t + 1; next < step->tokens && next < t + QUERIES && step->rows[next] == step->rows[t]; next++) {}
        for (int64_t h = 0; h < m->heads; h++, unit++) {
            if (unit % team->size != team->rank) continue;
            int64_t base = cache_row(m, c, layer, step->rows[t], h / group), used = step->slots[next - 1] + 1;
            const float* keys = load_rows(c, c->keys, c->key_scales, base, used, d, own.keys);
            const float* values = load_rows(c, c->values, c->value_scales, base, used, d, own.values);
            for (int64_t i = t, from = 0; i < next; i++) {
                const int32_t* positions = c->positions + step->rows[t] * c->capacity;
                if (b.window)
                    while (positions[from] <= step->positions[i] - b.window) from++;
                attend(s.q + i * q + h * d, keys, values, from, step->slots[i] + 1, d, m->attention_scale, own.scores, s.attention + i * q + h * d);
            }
        }
    }
    wait(team);
}

static void forward(const Model* m, const Cache* c, const Step* step, char* common, char* private_, const Team* team) {
    int64_t n = step->tokens, d = m->head_dim, q = m->heads * d, kv = m->kv_heads * d;
    Shared s = shared(m, n, step->kept, common, 0);
    Own own = owned(m, c, n, private_, 0);
    for (int64_t t = team->rank; t < n; t += team->size) gather(m->embedding, step->ids[t], m->embedding_scale, s.x + t * m->hidden);
    wait(team);
    for (int64_t l = 0; l < m->layers; l++) {
        const Block& b = m->blocks[l];
        const float* x = normalised(m, s.x, b.attention_norm, b.before_qkv, n, s.normal, own, team);
        const Matrix* qkv[3] = {&b.q, &b.k, &b.v};
        float* to[3] = {s.q, s.k, s.v};
        int64_t strides[3] = {q, kv, kv};
        linear(qkv, to, strides, 3, x, n, m->hidden, false, own, team);
        wait(team);
        attention(m, c, step, l, s, own, team);
        make_ready(b.before_o, s.attention, n, q, own, team);
        const Matrix* o[1] = {&b.o};
        float* sum[1] = {b.after_attention_norm ? s.spare : s.x};
        linear(o, sum, &m->hidden, 1, s.attention, n, q, !b.after_attention_norm, own, team);
        wait(team);
        if (b.after_attention_norm) add_normalised(m, s.spare, b.after_attention_norm, n, own.scores, s.x, team);
        x = normalised(m, s.x, b.mlp_norm, b.before_gate, n, s.normal, own, team);
        gated(m, b, x, n, s.h, own, team);
        wait(team);
        make_ready(b.before_down, s.h, n, m->intermediate, own, team);
        const Matrix* down[1] = {&b.down};
        sum[0] = b.after_mlp_norm ? s.spare : s.x;
        linear(down, sum, &m->hidden, 1, s.h, n, m->intermediate, !b.after_mlp_norm, own, team);
        wait(team);
        if (b.after_mlp_norm) add_normalised(m, s.spare, b.after_mlp_norm, n, own.scores, s.x, team);
    }
    for (int64_t i = team->rank; i < step->kept; i += team->size)
        normalise(s.x + step->keep[i] * m->hidden, m->norm, m->hidden, m->norm_eps, m->norm_offset, s.normal + i * m->hidden);
    wait(team);
    const Matrix* head[1] = {&m->head};
    float* logits[1] = {step->logits};
    if (step->kept) linear(head, logits, &m->head.rows, 1, s.normal, step->kept, m->hidden, false, own, team);
}

static int64_t shared_bytes(const Model* m, int64_t tokens, int64_t kept) {
    int64_t bytes;
    shared(m, tokens, kept, 0, &bytes);
    return bytes;
}

static int64_t private_bytes(const Model* m, const Cache* c, int64_t tokens) {
    int64_t bytes;
    owned(m, c, tokens, 0, &bytes);
    return bytes;
}

static int64_t multiply_bytes(const Matrix* w, int64_t tokens) { return round_up(input_bytes(*w, tokens)) + ROWS_AT_ONCE * PANEL * 4; }

static void multiply(const Matrix* w, const float* x, float* y, int64_t tokens, char* base, const Team* team) {
    Own own;
    own.input = base, own.tile = (float*)(base + round_up(input_bytes(*w, tokens)));
    linear(&w, &y, &w->rows, 1, x, tokens, w->cols, false, own, team);
}
