// Causal attention over a paged KV cache on a CPU: decoding, prefill and both in one step.
//
// A row of a step is the new tokens of one sequence. The work is divided into tiles: a tile is a few tokens
// of one row. For each tile and KV head, two small matrix products are computed, and between them a softmax
// over the keys. The products have a row for each pair of a token of the tile and a query head that shares
// the KV head.
//
//     scores [rows, keys]       = query [rows, head_dim] x keys [head_dim, keys]
//     out    [rows, head_dim]  += weights [rows, keys]   x values [keys, head_dim]
//
// The cache stores both right-hand sides in the order in which the products read them. If the CPU
// multiplies pairs of bfloat16, PACK is 2, otherwise 1: PACK successive elements of the summed dimension are
// adjacent in memory.
//
//     a head's keys of a block      [head_dim / PACK][BLOCK_SIZE][PACK]
//     a head's values of a block    [BLOCK_SIZE / PACK][head_dim][PACK]
//
// The bits of a token's result depend only on its query and on the keys and values that it sees, not on its
// tile, its row, the batch or the number of threads. The value of a position that was never written is
// not multiplied, because it may be NaN. The key of such a position is multiplied, but the resulting score
// is then replaced.
//
// All members of a team call write and attend together, and divide the tiles among themselves.
//
// Sums are in single precision. With pairs of bfloat16 the weights are rounded to bfloat16.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../native/element.h"
#include "../native/team.h"
#include "../native/vector.h"

// Hidden visibility, because libraries for other types or head dimensions define the same names.
namespace [[gnu::visibility("hidden")]] paged {

using element::narrow;
using element::Stored;
using element::wide;
using vector::Floats;
using vector::Ints;
using vector::LANES;
using vector::loaded;
using vector::spread;
using vector::store;

constexpr int TILE_TOKENS = 8;
//: Tiles with at most this many tokens are limited by memory bandwidth, so each reads a block for all KV
//: heads at once.
constexpr int FEW_TOKENS = 2;
//: If there are at least this many tiles per thread, a thread computes all KV heads of a tile, otherwise one.
constexpr int TILES_A_THREAD = 4;
//: Maximum number of rows of a product's left-hand side that are multiplied at once, with sums in registers.
constexpr int MAX_STRIP = vector::REGISTERS >= 32 ? 8 : 6;
//: Keys per chunk. The largest score so far is updated once per chunk. Chunks begin at multiples of CHUNK.
constexpr int CHUNK = 4 * BLOCK_SIZE;
constexpr float LOG2_E = 1.44269504088896341f;

static_assert(BLOCK_SIZE % (2 * LANES) == 0);

// The vector 0, 1, 2, ...
inline Ints counting() {
    Ints numbers;
    for (int i = 0; i < LANES; ++i) numbers[i] = i;
    return numbers;
}

// The larger value in each lane; the value of b if a or b is NaN.
inline Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float largest(Floats vector) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)vector);
#else
    float most = vector[0];
    for (int i = 1; i < LANES; ++i) most = std::max(most, vector[i]);
    return most;
#endif
}

inline float total(Floats vector) {
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += vector[i];
    return sum;
}

// 2^x for x <= 126, but at least 2^-126; NaN for NaN.
inline Floats exp2(Floats x) {
    x = larger(spread(-126.0f), x);
    const Floats shift = spread(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats whole = x + shift;
    const Floats part = x - (whole - shift);
    const Floats y = element::exp2_of_part(part);
#ifdef __AVX512F__
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)(whole - shift));
#else
    return y * (Floats)(((Ints)whole << 23) + 0x3f800000);
#endif
}

inline Floats tanh(Floats x) {
    x = x < -20.0f ? spread(-20.0f) : x > 20.0f ? spread(20.0f) : x;
    return 1.0f - 2.0f / (exp2(x * (2 * LOG2_E)) + 1.0f);
}

// Units of multiplication, for the element type of cache, queries and outputs. One instruction multiplies a
// Word of a product's left-hand side by Lanes of its right-hand side.

#if defined(BFLOAT16) && defined(__AVX512BF16__) && HEAD_DIM % 2 == 0

constexpr int PACK = 2;
using Word = uint32_t;
using Lanes = __m512bh;

inline Word word_at(const Stored* from) { return loaded<Word>(from); }

inline Lanes lanes_at(const Stored* from) { return (Lanes)loaded<__m512i>(from); }

inline Floats multiplied(Floats sum, Word word, Lanes lanes) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (Lanes)_mm512_set1_epi32(word), lanes);
}

inline void pack(Word* to, Floats low, Floats high) {
    store(to, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

#else

constexpr int PACK = 1;
using Word = float;
using Lanes = Floats;

inline Word word_at(const Stored* from) { return wide(*from); }

inline Lanes lanes_at(const Stored* from) { return vector::wide(from); }

inline Floats multiplied(Floats sum, Word word, Lanes lanes) {
    return vector::multiply_add(word, lanes, sum);
}

inline void pack(Word* to, Floats low, Floats high) {
    store(to, low);
    store(to + LANES, high);
}

#endif

constexpr int WORDS = HEAD_DIM / PACK;
constexpr int PADDED = (HEAD_DIM + LANES - 1) / LANES * LANES;
//: Elements of one head's keys, or values, in a block.
constexpr int64_t RUN = BLOCK_SIZE * HEAD_DIM;
constexpr int64_t LINE = 64 / sizeof(Stored);

// `number` lanes at `from`, which may be fewer than LANES, followed by zeros.
inline Lanes lanes_at(const Stored* from, int number) {
    if (number == LANES) return lanes_at(from);
    Stored all[LANES * PACK] = {};
    std::memcpy(all, from, number * PACK * sizeof *all);
    return lanes_at(all);
}

// sums [R][C * LANES] += left [R][n words] x right [n][right_stride packs]. The last LANES columns of right
// have only LAST columns.
template <int LAST, int R, int C>
inline void multiply(Floats (&sums)[R][C], const Word* left, int left_stride, const Stored* right,
                     int right_stride, int n) {
    for (int i = 0; i < n; ++i, right += right_stride * PACK) {
        Lanes lanes[C];
        for (int c = 0; c < C; ++c)
            lanes[c] = lanes_at(right + c * LANES * PACK, c == C - 1 ? LAST : LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Word word = left[r * left_stride + i];
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) sums[r][c] = multiplied(sums[r][c], word, lanes[c]);
        }
    }
}

template <int N>
using Constant = std::integral_constant<int, N>;

// Calls work(number of rows, first row) for each strip of rows. The number is a compile-time constant.
template <class Work>
inline void in_strips(int rows, Work work) {
    static_assert(MAX_STRIP <= 8);
    // Strips of about equal size: nine rows are five and four, not eight and one.
    int strips = (rows + MAX_STRIP - 1) / MAX_STRIP;
    for (int first = 0, number; first < rows; first += number, --strips) {
        switch (number = (rows - first + strips - 1) / strips) {
            case 1: work(Constant<1>(), first); break;
            case 2: work(Constant<2>(), first); break;
            case 3: work(Constant<3>(), first); break;
            case 4: work(Constant<4>(), first); break;
            case 5: work(Constant<5>(), first); break;
            case 6: work(Constant<6>(), first); break;
            case 7: work(Constant<7>(), first); break;
            case 8: work(Constant<8>(), first); break;
        }
    }
}

// Structures that Python passes; worker/attention/cpu.py defines the same ones.

struct Cache {
    void* blocks;  // [blocks][layers][keys, values][kv_heads][RUN]
    int64_t layers, kv_heads;
};

struct Row {
    int64_t first_token;  // index in the step
    int64_t tokens;
    int64_t start;        // position of the first token
    int64_t first_block;  // index in Step.tables
    int64_t first_tile;   // index in the step
};

struct Step {
    const Row* rows;
    const int32_t* tables;
    int64_t num_rows, num_tiles;
};

struct Form {
    float scale;
    float softcap;       // 0: none
    int64_t window;      // 0: none
    const float* sinks;  // [heads], or null
};

struct Tile {
    const Row& row;
    int64_t begin, tokens;  // first token, relative to the row's, and number of tokens

    int64_t first_token() const { return row.first_token + begin; }
    int64_t first_position() const { return row.start + begin; }
    int64_t end_position() const { return first_position() + tokens; }
};

inline Tile tile_at(const Step& step, int64_t index) {
    const auto later = [](int64_t i, const Row& row) { return i < row.first_tile; };
    const Row& row = *(std::upper_bound(step.rows, step.rows + step.num_rows, index, later) - 1);
    const int64_t begin = (index - row.first_tile) * TILE_TOKENS;
    return {row, begin, std::min<int64_t>(TILE_TOKENS, row.tokens - begin)};
}

// Calls item(tile, first KV head, end of KV heads) for all tiles and KV heads. The last tiles come first,
// because they belong to prompts and take longest.
template <class Item>
void for_each_item(team::Member& me, const Step& step, int64_t kv_heads, const Item& item) {
    const int64_t together = step.num_tiles >= TILES_A_THREAD * me.threads ? kv_heads : 1;
    const int64_t parts = kv_heads / together, items = step.num_tiles * parts;
    me.share(items, 1, [&](int64_t taken) {
        const int64_t i = items - 1 - taken, head = i % parts * together;
        item(tile_at(step, i / parts), head, head + together);
    });
}

// Addresses of one layer's keys and values for a step.
struct Layer {
    Layer(const Cache& cache, const Step& step, int64_t layer)
        : tables(step.tables), values_after(cache.kv_heads * RUN),
          block_size(cache.layers * 2 * values_after),
          first((Stored*)cache.blocks + layer * 2 * values_after) {}

    // The keys of the block in which `position` of the tile's row lies.
    Stored* keys(const Tile& tile, int64_t position, int64_t head) const {
        const int64_t block = tables[tile.row.first_block + position / BLOCK_SIZE];
        return first + block * block_size + head * RUN;
    }

    // The values of `position` and of the other position of its pack, in their block.
    Stored* values(const Tile& tile, int64_t position, int64_t head) const {
        const int64_t pack = position % BLOCK_SIZE / PACK;
        return keys(tile, position, head) + values_after + pack * HEAD_DIM * PACK;
    }

    const int32_t* tables;
    int64_t values_after, block_size;
    Stored* first;
};

// Stores a tile's keys and values. Their tokens are key_stride and value_stride elements apart.
struct Writer {
    void operator()(const Tile& tile, int64_t head, int64_t end_head) const {
        if (tile.tokens <= FEW_TOKENS)
            for (int64_t h = head; h < end_head; ++h) fetch(tile, h);
        for (; head < end_head; ++head) write(tile, head);
    }

    // Prefetches the cache lines of a key. Each word of the key is in another line. Without the prefetch, the
    // thread would wait for one cache miss after another.
    void fetch(const Tile& tile, int64_t head) const {
        const int64_t position = tile.first_position();
        const Stored* to = layer.keys(tile, position, head) + position % BLOCK_SIZE * PACK;
        asm volatile("");  // as in Attender::fetch
        for (int i = 0; i < WORDS; ++i) __builtin_prefetch(to + i * BLOCK_SIZE * PACK, 1);
    }

    void write(const Tile& tile, int64_t head) const {
        for (int64_t i = 0; i < tile.tokens; ++i) {
            const int64_t token = tile.first_token() + i, position = tile.first_position() + i;
            write_key(layer.keys(tile, position, head) + position % BLOCK_SIZE * PACK,
                      key + token * key_stride + head * HEAD_DIM);
            write_value(layer.values(tile, position, head) + position % PACK,
                        value + token * value_stride + head * HEAD_DIM);
        }
    }

    static void write_key(Stored* to, const Stored* from) {
        for (int i = 0; i < WORDS; ++i)
            std::memcpy(to + i * BLOCK_SIZE * PACK, from + i * PACK, PACK * sizeof *to);
    }

    // Writes single elements, because another thread may be writing the other position of the pack.
    static void write_value(Stored* to, const Stored* from) {
        for (int i = 0; i < HEAD_DIM; ++i) to[i * PACK] = from[i];
    }

    Layer layer;
    const Stored* key;
    int64_t key_stride;
    const Stored* value;
    int64_t value_stride;
};

// Packs of values that are adjacent in the cache. There are `packs` packs, the first of which is pack `at` of
// the chunk.
struct Values {
    const Stored* first;
    int64_t at, packs;
};

// Work space of one thread. A row is a token of the tile with one query head.
struct Scratch {
    std::vector<Word> query;       // [rows][WORDS]
    std::vector<float> scores;     // [rows][CHUNK]
    std::vector<Word> weights;     // [rows][CHUNK / PACK]
    std::vector<float> most;       // [rows], largest score so far
    std::vector<float> shrinking;  // [rows], factor that rescales earlier sums to a larger `most`
    std::vector<Floats> sums;      // [rows], sum of the weights in each lane
    std::vector<float> out;        // [rows][PADDED]
    Stored edge[HEAD_DIM * PACK] = {};  // values of a position, and zeros for the rest of its pack
    std::vector<Values> values;    // values of the chunk, block by block

    explicit Scratch(int64_t rows)
        : query(rows * WORDS), scores(rows * CHUNK), weights(rows * CHUNK / PACK),
          most(rows), shrinking(rows), sums(rows), out(rows * PADDED) {}
};

// Part of a tile's context: the positions from `left` to before `right`, in the chunk that begins at `at`.
struct Chunk {
    int64_t at, left, right;

    int64_t first_block() const { return left / BLOCK_SIZE * BLOCK_SIZE; }
    int64_t end_block() const { return (right + BLOCK_SIZE - 1) / BLOCK_SIZE * BLOCK_SIZE; }
};

// Range of positions from `begin` to before `end`.
struct Places {
    int begin, end;

    // `values` in lanes whose positions are in the range, `other` in the others. Lane 0 has position `at`.
    Floats masked(Floats values, int at, float other) const {
        const Ints places = counting() + at;
        return (places >= begin) & (places < end) ? values : spread(other);
    }
};

class Attender {
public:
    Attender(const Layer& layer, const Stored* query, int64_t query_stride, Stored* out,
             int64_t heads, int64_t kv_heads, const Form& form)
        : layer(layer), query(query), query_stride(query_stride), out(out), heads(heads),
          group(heads / kv_heads), form(form) {}

    void operator()(const Tile& tile, int64_t head, int64_t end_head) const {
        const int64_t together = tile.tokens <= FEW_TOKENS ? end_head - head : 1;
        for (; head < end_head; head += together) attend(tile, head, head + together);
    }

private:
    // Computes the tile chunk by chunk, each chunk for all KV heads from `head` to before `end_head`. These
    // heads are adjacent in the cache.
    void attend(const Tile& tile, int64_t head, int64_t end_head) const {
        thread_local std::vector<Scratch> scratch;
        while (scratch.size() < size_t(end_head - head)) scratch.emplace_back(0);
        for (int64_t h = head; h < end_head; ++h) begin(tile, h, scratch[h - head]);
        const int64_t end = tile.end_position(), first = first_seen(tile.first_position());
        for (int64_t at = first / CHUNK * CHUNK; at < end; at += CHUNK) {
            const Chunk chunk{at, std::max(first, at), std::min(end, at + CHUNK)};
            for (int64_t h = head; h < end_head; ++h) {
                const bool next_head = h + 1 < end_head;
                score(tile, h, chunk, scratch[h - head], [&](int64_t position) {
                    if (next_head) fetch(tile, position, h + 1);
                    else if (position + CHUNK < end) fetch(tile, position + CHUNK, head);
                });
                weigh(tile, chunk, scratch[h - head]);
                add_up(tile, h, chunk, scratch[h - head]);
            }
        }
        for (int64_t h = head; h < end_head; ++h) finish(tile, h, scratch[h - head]);
    }

    int rows_of(const Tile& tile) const { return tile.tokens * group; }

    int64_t first_seen(int64_t position) const {
        return form.window ? std::max<int64_t>(0, position - form.window + 1) : 0;
    }

    int64_t head_of(int64_t kv_head, int row) const { return kv_head * group + row % group; }

    void begin(const Tile& tile, int64_t head, Scratch& scratch) const {
        const int rows = rows_of(tile);
        if (scratch.most.size() < size_t(rows)) scratch = Scratch(rows);
        std::fill_n(scratch.out.begin(), rows * PADDED, 0.0f);
        for (int r = 0; r < rows; ++r) {
            const int64_t token = tile.first_token() + r / group;
            const Stored* from = query + token * query_stride + head_of(head, r) * HEAD_DIM;
            for (int i = 0; i < WORDS; ++i) scratch.query[r * WORDS + i] = word_at(from + i * PACK);
            // A sink is treated as the score of a key before all others, whose value is zero.
            scratch.most[r] = form.sinks ? form.sinks[head_of(head, r)] * LOG2_E : -FLT_MAX;
            scratch.sums[r] = Floats{form.sinks ? 1.0f : 0.0f};
        }
    }

    // Prefetches a later block into the L2 cache. The CPU does not prefetch across pages by itself, and the
    // next block is in another page.
    void fetch(const Tile& tile, int64_t position, int64_t head) const {
        const Stored* keys = layer.keys(tile, position, head);
        // Without this statement, GCC removes the calls, because the function has no side effects.
        asm volatile("");
        for (int64_t i = 0; i < RUN; i += LINE) __builtin_prefetch(keys + i, 0, 2);
        for (int64_t i = 0; i < RUN; i += LINE)
            __builtin_prefetch(keys + layer.values_after + i, 0, 2);
    }

    // Computes the scores of the chunk. Calls before(first position of the block) before each block.
    template <class Before>
    void score(const Tile& tile, int64_t head, const Chunk& chunk, Scratch& scratch,
               const Before& before) const {
        for (int64_t at = chunk.first_block(); at < chunk.right; at += BLOCK_SIZE) {
            before(at);
            const Stored* keys = layer.keys(tile, at, head);
            in_strips(rows_of(tile), [&](auto strip, int first) {
                constexpr int R = decltype(strip)::value, C = 2;
                for (int column = 0; column < BLOCK_SIZE; column += C * LANES) {
                    Floats sums[R][C] = {};
                    multiply<LANES>(sums, &scratch.query[first * WORDS], WORDS, keys + column * PACK,
                                    BLOCK_SIZE, WORDS);
                    float* to = &scratch.scores[first * CHUNK + at - chunk.at + column];
                    for (int r = 0; r < R; ++r)
                        for (int c = 0; c < C; ++c) store(to + r * CHUNK + c * LANES, sums[r][c]);
                }
            });
        }
    }

    // Replaces scores by weights. Weights are powers of 2, because scores are multiplied by log2(e).
    void weigh(const Tile& tile, const Chunk& chunk, Scratch& scratch) const {
        const int begin = chunk.first_block() - chunk.at, end = chunk.end_block() - chunk.at;
        for (int r = 0; r < rows_of(tile); ++r) {
            const int64_t position = tile.first_position() + r / group;
            const Places all{begin, end};
            const Places seen{int(std::max<int64_t>(first_seen(position) - chunk.at, begin)),
                              int(std::min<int64_t>(position + 1 - chunk.at, end))};
            if (seen.begin == begin && seen.end == end)
                weigh_row<false>(r, all, seen, scratch);
            else
                weigh_row<true>(r, all, seen, scratch);
        }
    }

    // Computes the weights of row r at positions `all`. If MASKED, positions outside `seen` get weight 0.
    template <bool MASKED>
    void weigh_row(int r, Places all, Places seen, Scratch& scratch) const {
        float* scores = &scratch.scores[r * CHUNK];
        Floats most = spread(scratch.most[r]);
        for (int at = all.begin; at < all.end; at += LANES) {
            Floats score = scaled(loaded<Floats>(scores + at));
            if (MASKED) score = seen.masked(score, at, -FLT_MAX);
            store(scores + at, score);
            most = larger(score, most);
        }
        const float new_most = largest(most);
        const float shrinking = exp2(spread(scratch.most[r] - new_most))[0];
        Floats sum = scratch.sums[r] * shrinking;
        for (int at = all.begin; at < all.end; at += 2 * LANES) {
            Floats low = exp2(loaded<Floats>(scores + at) - new_most);
            Floats high = exp2(loaded<Floats>(scores + at + LANES) - new_most);
            if (MASKED) low = seen.masked(low, at, 0), high = seen.masked(high, at + LANES, 0);
            sum = sum + low + high;
            pack(&scratch.weights[(r * CHUNK + at) / PACK], low, high);
        }
        scratch.most[r] = new_most;
        scratch.shrinking[r] = shrinking;
        scratch.sums[r] = sum;
    }

    // Scores of products, multiplied by log2(e) so that exp2 can be used.
    Floats scaled(Floats products) const {
        if (!form.softcap) return products * (form.scale * LOG2_E);
        return tanh(products * (form.scale / form.softcap)) * (form.softcap * LOG2_E);
    }

    // Collects the values of the chunk's positions. If only the first position of the last pack is in the
    // chunk, the pack is copied, with zeros for its second position, which may not have been written.
    void collect(const Tile& tile, int64_t head, const Chunk& chunk, Scratch& scratch) const {
        scratch.values.clear();
        for (int64_t at = chunk.left, end; at < chunk.right; at = end) {
            end = std::min((at / BLOCK_SIZE + 1) * BLOCK_SIZE, chunk.right);
            const int64_t first = (at - chunk.at) / PACK, past = (end - chunk.at) / PACK;
            scratch.values.push_back({layer.values(tile, at, head), first, past - first});
        }
        if (chunk.right % PACK == 0) return;
        const Stored* pack = layer.values(tile, chunk.right - 1, head);
        for (int i = 0; i < HEAD_DIM; ++i) scratch.edge[i * PACK] = pack[i * PACK];
        scratch.values.push_back({scratch.edge, (chunk.right - chunk.at) / PACK, 1});
    }

    // out = out * shrinking + weights x values
    void add_up(const Tile& tile, int64_t head, const Chunk& chunk, Scratch& scratch) const {
        collect(tile, head, chunk, scratch);
        in_strips(rows_of(tile), [&](auto strip, int first) {
            constexpr int R = decltype(strip)::value, WIDE = 2 * LANES, REST = HEAD_DIM % WIDE;
            for (int column = 0; column + WIDE <= HEAD_DIM; column += WIDE)
                add_up_columns<R, 2, LANES>(first, column, scratch);
            if constexpr (REST >= LANES)
                add_up_columns<R, 1, LANES>(first, HEAD_DIM - REST, scratch);
            if constexpr (REST % LANES)
                add_up_columns<R, 1, REST % LANES>(first, HEAD_DIM - REST % LANES, scratch);
        });
    }

    template <int R, int C, int LAST>
    static void add_up_columns(int first, int column, Scratch& scratch) {
        Floats sums[R][C];
        float* to = &scratch.out[first * PADDED + column];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                sums[r][c] = loaded<Floats>(to + r * PADDED + c * LANES) * scratch.shrinking[first + r];
        constexpr int STRIDE = CHUNK / PACK;
        for (const Values& values : scratch.values)
            multiply<LAST>(sums, &scratch.weights[first * STRIDE + values.at], STRIDE,
                           values.first + column * PACK, HEAD_DIM, values.packs);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) store(to + r * PADDED + c * LANES, sums[r][c]);
    }

    void finish(const Tile& tile, int64_t head, const Scratch& scratch) const {
        for (int r = 0; r < rows_of(tile); ++r) {
            const float share = 1.0f / total(scratch.sums[r]);
            const float* from = &scratch.out[r * PADDED];
            const int64_t token = tile.first_token() + r / group;
            Stored* to = out + (token * heads + head_of(head, r)) * HEAD_DIM;
            for (int i = 0; i < HEAD_DIM; ++i) to[i] = narrow(from[i] * share);
        }
    }

    const Layer layer;
    const Stored* const query;
    const int64_t query_stride;
    Stored* const out;
    const int64_t heads, group;
    const Form form;
};

// Queries, keys or values of a step, [tokens][heads][HEAD_DIM]. Tokens are `stride` elements apart; the heads
// of a token are contiguous.
template <class Element>
struct Heads {
    Element* first;
    int64_t stride;
};

inline void write(team::Member& me, const Cache& cache, const Step& step, int64_t layer,
                  Heads<const Stored> key, Heads<const Stored> value) {
    const Writer writer{Layer(cache, step, layer), key.first, key.stride, value.first, value.stride};
    for_each_item(me, step, cache.kv_heads, writer);
}

// Writes the attention of `query` to `out` [tokens][heads][HEAD_DIM], which is contiguous.
inline void attend(team::Member& me, const Cache& cache, const Step& step, int64_t layer,
                   Heads<const Stored> query, Stored* out, int64_t heads, const Form& form) {
    const Attender attender(Layer(cache, step, layer), query.first, query.stride, out, heads,
                            cache.kv_heads, form);
    for_each_item(me, step, cache.kv_heads, attender);
}

}  // namespace paged
