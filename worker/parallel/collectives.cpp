// Collectives of the ranks of one host, through memory that all ranks have mapped.
//
//     | seat of rank 0 | seat of rank 1 | ... | slots of rank 0 | slots of rank 1 | ...
//
// A rank writes to its own seat and its own two slots, and reads those of the other ranks. A tensor
// is transferred in chunks of at most one slot, which use the two slots alternately. The count in a
// seat is the number of chunks that its rank has reached. All data that the rank writes for these
// chunks can be read. All ranks make the same calls, so each rank knows for which count of another
// rank it has to wait.
//
// A slot is overwritten two chunks later. A rank that has reached the chunk in between has read the
// slot, so the writer waits until all ranks have reached that chunk.
//
// A waiting rank polls for a while and then sleeps on the other rank's count (futex). Each rank
// holds a lock on one byte of the memory's file. The kernel releases the lock when the rank's
// process ends, for whatever reason and in whatever container. A rank that has slept for a while
// tests this lock to find out whether the other rank still exists. An increment of a count on which
// no rank sleeps needs no system call.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <limits>

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../native/element.h"

namespace {

constexpr int kMaxRanks = 64;
// Two cache lines, because some CPUs fetch them in pairs.
constexpr size_t kAlignment = 128;
// Number of elements whose sums are accumulated at a time, in fp32 or int64. They fit in the L1
// cache.
constexpr size_t kBlock = 1024;
// Time that a rank polls before it sleeps. Between polls it offers its core to other processes,
// because one of them may be the rank for which it waits. A wake-up takes about 40 us; if a busy
// process has the core, the wake-up takes the rest of that process's time slice.
constexpr int64_t kPollNs = 1'000'000;
// Time that a rank sleeps before it tests whether the other rank still exists.
constexpr int64_t kLookNs = 50'000'000;

constexpr int kDone = 0, kLate = -1;  // statuses; the status 1 + r means that rank r has ended

struct alignas(kAlignment) Seat {
    std::atomic<uint32_t> count;
    std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

using element::Bfloat16;
using element::narrow;
using element::wide;
inline int64_t wide(int64_t from) { return from; }
inline void narrow(int64_t from, int64_t& to) { to = from; }

// out = parts[0] + parts[1] + ..., in this order; out may be one of the parts.
template <typename T>
void sum(const void* const* parts, int ranks, void* out, size_t elements) {
    using Wide = decltype(wide(T()));
    Wide total[kBlock];
    for (size_t from = 0; from < elements; from += kBlock) {
        const size_t count = std::min(kBlock, elements - from);
        const T* first = static_cast<const T*>(parts[0]) + from;
        for (size_t i = 0; i < count; ++i) total[i] = wide(first[i]);
        for (int rank = 1; rank < ranks; ++rank) {
            const T* part = static_cast<const T*>(parts[rank]) + from;
            for (size_t i = 0; i < count; ++i) total[i] += wide(part[i]);
        }
        T* to = static_cast<T*>(out) + from;
        for (size_t i = 0; i < count; ++i) narrow(total[i], to[i]);
    }
}

struct Kind {
    size_t size;
    void (*sum)(const void* const* parts, int ranks, void* out, size_t elements);
};

// The index is the number of the kind in collectives.py.
constexpr Kind kKinds[] = {
    {sizeof(float), sum<float>},
    {sizeof(Bfloat16), sum<Bfloat16>},
    {sizeof(element::Half), sum<element::Half>},
    {sizeof(int64_t), sum<int64_t>},
};

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

class Collectives {
public:
    Collectives(
        int file, std::byte* memory, int rank, int size, size_t slot_bytes, int64_t timeout_ns
    )
        : file_(file),
          memory_(memory),
          rank_(rank),
          size_(size),
          slot_bytes_(slot_bytes),
          timeout_ns_(timeout_ns) {}

    static size_t bytes(int size, size_t slot_bytes) {
        return size * (sizeof(Seat) + 2 * slot_bytes);
    }

    // The kernel releases the lock when the memory is unmapped and the file is closed.
    ~Collectives() {
        munmap(memory_, bytes(size_, slot_bytes_));
        close(file_);
    }
    Collectives(const Collectives&) = delete;

    // Every rank computes the whole sum, in the order of the ranks.
    int all_reduce(std::byte* data, size_t elements, const Kind& kind) {
        const size_t most = slot_bytes_ / kind.size;
        for (size_t from = 0; from < elements; from += most) {
            const size_t count = std::min(most, elements - from);
            std::byte* own = data + from * kind.size;
            if (const int status = write(own, count * kind.size)) return status;
            const void* parts[kMaxRanks];
            for (int rank = 0; rank < size_; ++rank) {
                if (const int status = wait_for(rank, chunk_)) return status;
                parts[rank] = rank == rank_ ? own : slot(rank, chunk_);
            }
            kind.sum(parts, size_, own, count);
        }
        return kDone;
    }

    int broadcast(std::byte* data, size_t length) {
        for (size_t from = 0; from < length; from += slot_bytes_) {
            const size_t count = std::min(slot_bytes_, length - from);
            if (rank_ == 0) {
                if (const int status = write(data + from, count)) return status;
            } else {
                advance();
                if (const int status = wait_for(0, chunk_)) return status;
                std::memcpy(data + from, slot(0, chunk_), count);
            }
        }
        return kDone;
    }

    // Copies the rows of all ranks side by side to rank 0's `out`. Each rank contributes `width`
    // bytes to a row; `length` is the number of bytes of a rank's shard.
    int gather(const std::byte* shard, size_t length, size_t width, std::byte* out) {
        for (size_t from = 0; from < length; from += slot_bytes_) {
            const size_t count = std::min(slot_bytes_, length - from);
            if (rank_ != 0) {
                if (const int status = write(shard + from, count)) return status;
                continue;
            }
            advance();
            place(shard + from, from, count, width, out);
            for (int rank = 1; rank < size_; ++rank) {
                if (const int status = wait_for(rank, chunk_)) return status;
                place(slot(rank, chunk_), from, count, width, out + rank * width);
            }
        }
        return kDone;
    }

    int barrier() {
        advance();
        for (int rank = 0; rank < size_; ++rank)
            if (const int status = wait_for(rank, chunk_)) return status;
        return kDone;
    }

    bool take_seat() {
        struct flock lock = seat_lock(rank_);
        return fcntl(file_, F_OFD_SETLK, &lock) == 0;
    }

    // Returns whether another process holds the lock of the seat of `rank`.
    bool is_there(int rank) const {
        struct flock lock = seat_lock(rank);
        return fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
    }

private:
    const int file_;
    std::byte* const memory_;
    const int rank_, size_;
    const size_t slot_bytes_;
    const int64_t timeout_ns_;
    uint32_t chunk_ = 0;

    Seat& seat(int rank) const { return reinterpret_cast<Seat*>(memory_)[rank]; }

    std::byte* slot(int rank, uint32_t chunk) const {
        return memory_ + size_ * sizeof(Seat) + (2 * rank + chunk % 2) * slot_bytes_;
    }

    // Writes the data of the next chunk, which the other ranks can read from then on.
    int write(const std::byte* from, size_t count) {
        for (int rank = 0; rank < size_; ++rank)
            if (const int status = wait_for(rank, chunk_)) return status;
        std::memcpy(slot(rank_, chunk_ + 1), from, count);
        advance();
        return kDone;
    }

    // Advances this rank to the next chunk and wakes the ranks that sleep on its count. It stores
    // the count before it reads `sleepers`. A sleeping rank increments `sleepers` before it reads
    // the count. So at least one of the two sees the other's change, and no wake-up is lost.
    void advance() {
        Seat& own = seat(rank_);
        own.count.store(++chunk_);
        if (own.sleepers.load())
            syscall(SYS_futex, &own.count, FUTEX_WAKE, std::numeric_limits<int>::max());
    }

    int wait_for(int rank, uint32_t chunk) const {
        const int64_t began = now_ns();
        do {
            if (has_reached(rank, chunk)) return kDone;
            sched_yield();
        } while (now_ns() - began < kPollNs);
        for (int64_t looked = began; !has_reached(rank, chunk);) {
            sleep(seat(rank), chunk);
            const int64_t now = now_ns();
            if (now - looked < kLookNs) continue;
            looked = now;
            // The rank may have reached the chunk before it ended.
            if (!is_there(rank)) return has_reached(rank, chunk) ? kDone : 1 + rank;
            if (now - began > timeout_ns_) return kLate;
        }
        return kDone;
    }

    bool has_reached(int rank, uint32_t chunk) const {
        return reaches(seat(rank).count.load(), chunk);
    }

    // Compares by the difference, because counts wrap around.
    static bool reaches(uint32_t count, uint32_t chunk) {
        return static_cast<int32_t>(count - chunk) >= 0;
    }

    // Sleeps until the rank of `seat` advances, for at most kLookNs. May return earlier. Returns at
    // once if that rank has already reached `chunk`.
    static void sleep(Seat& seat, uint32_t chunk) {
        const timespec look{0, kLookNs};
        ++seat.sleepers;
        const uint32_t seen = seat.count.load();
        if (!reaches(seen, chunk)) syscall(SYS_futex, &seat.count, FUTEX_WAIT, seen, &look);
        --seat.sleepers;
    }

    // Copies bytes [from, from + count) of a shard to their positions in the rows of all ranks.
    void place(const std::byte* bytes, size_t from, size_t count, size_t width, std::byte* out) {
        while (count) {
            const size_t row = from / width, column = from % width;
            const size_t part = std::min(count, width - column);
            std::memcpy(out + row * width * size_ + column, bytes, part);
            bytes += part, from += part, count -= part;
        }
    }

    static struct flock seat_lock(int rank) {
        struct flock lock {};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = rank;
        lock.l_len = 1;
        return lock;
    }
};

}  // namespace

extern "C" {

size_t collectives_bytes(int size, size_t slot_bytes) {
    return Collectives::bytes(size, slot_bytes);
}

// Maps `file` and locks the seat of `rank`. Takes ownership of `file`, which is closed by
// collectives_close, or before the return if this call fails. Returns null if there are more than
// kMaxRanks ranks, or if the memory cannot be mapped or the seat not be locked.
void* collectives_open(int file, int rank, int size, size_t slot_bytes, int64_t timeout_ns) {
    const size_t bytes = Collectives::bytes(size, slot_bytes);
    void* mapped = MAP_FAILED;
    if (size <= kMaxRanks)
        mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        close(file);
        return nullptr;
    }
    auto* memory = static_cast<std::byte*>(mapped);
    auto* made = new Collectives(file, memory, rank, size, slot_bytes, timeout_ns);
    if (made->take_seat()) return made;
    delete made;
    return nullptr;
}

void collectives_close(void* collectives) { delete static_cast<Collectives*>(collectives); }

int collectives_all_reduce(void* collectives, void* data, size_t elements, int kind) {
    return static_cast<Collectives*>(collectives)
        ->all_reduce(static_cast<std::byte*>(data), elements, kKinds[kind]);
}

int collectives_broadcast(void* collectives, void* data, size_t length) {
    return static_cast<Collectives*>(collectives)->broadcast(static_cast<std::byte*>(data), length);
}

int collectives_gather(
    void* collectives, const void* shard, size_t length, size_t width, void* out
) {
    return static_cast<Collectives*>(collectives)
        ->gather(static_cast<const std::byte*>(shard), length, width, static_cast<std::byte*>(out));
}

int collectives_barrier(void* collectives) {
    return static_cast<Collectives*>(collectives)->barrier();
}

}  // extern "C"
