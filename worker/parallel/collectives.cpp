// Collectives of the ranks of one host, through memory that all of them have mapped.
//
//     | seat of rank 0 | seat of rank 1 | ... | slots of rank 0 | slots of rank 1 | ...
//
// A rank writes to its own seat and its own two slots, and reads those of the others. A tensor goes
// through in chunks of at most a slot, which take turns between the two. A seat counts the chunks
// to which its rank has come: what it had to write of them can be read. All ranks make the same
// calls, so each knows for what count of another one it has to wait.
//
// A slot is written again two chunks later. Whoever has come to the chunk in between has read it: a
// rank waits for that before it writes.
//
// A rank that waits looks for a while, and then sleeps on the other's count (futex). Each of them
// holds a lock on one byte of the memory's file, which the kernel lets go of when its process ends,
// however it ends and in whatever container it is: who has slept for a while looks at it. A count
// that nobody sleeps on costs no system call.

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
// Two cache lines, which some CPUs fetch together.
constexpr size_t kAlignment = 128;
// Elements whose sums are kept in fp32 at once; they stay in the first cache.
constexpr size_t kBlock = 1024;
// How long a rank looks before it sleeps. Meanwhile it offers its core to whoever else wants it,
// which may be the very rank that is waited for. Being woken takes some 40 us, and beside a busy
// process as long as that one's time slice still lasts.
constexpr int64_t kPatienceNs = 1'000'000;
// How long a rank sleeps before it looks whether the other one still lives.
constexpr int64_t kLookNs = 50'000'000;

constexpr int kDone = 0, kLate = -1;  // and 1 + r where rank r is gone

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

// By the numbers of collectives.py.
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

    // The lock is let go of when neither the memory nor the file is held any more.
    ~Collectives() {
        munmap(memory_, bytes(size_, slot_bytes_));
        close(file_);
    }
    Collectives(const Collectives&) = delete;

    // Each rank sums all of it.
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
                come();
                if (const int status = wait_for(0, chunk_)) return status;
                std::memcpy(data + from, slot(0, chunk_), count);
            }
        }
        return kDone;
    }

    // Rank 0's out is rows of width bytes of each rank, side by side.
    int gather(const std::byte* shard, size_t length, size_t width, std::byte* out) {
        for (size_t from = 0; from < length; from += slot_bytes_) {
            const size_t count = std::min(slot_bytes_, length - from);
            if (rank_ != 0) {
                if (const int status = write(shard + from, count)) return status;
                continue;
            }
            come();
            place(shard + from, from, count, width, out);
            for (int rank = 1; rank < size_; ++rank) {
                if (const int status = wait_for(rank, chunk_)) return status;
                place(slot(rank, chunk_), from, count, width, out + rank * width);
            }
        }
        return kDone;
    }

    int barrier() {
        come();
        for (int rank = 0; rank < size_; ++rank)
            if (const int status = wait_for(rank, chunk_)) return status;
        return kDone;
    }

    bool take_seat() {
        struct flock lock = seat_lock(rank_);
        return fcntl(file_, F_OFD_SETLK, &lock) == 0;
    }

    // Whether anybody holds the lock of its seat.
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

    // The next chunk's, where the others can read it from now on.
    int write(const std::byte* from, size_t count) {
        for (int rank = 0; rank < size_; ++rank)
            if (const int status = wait_for(rank, chunk_)) return status;
        std::memcpy(slot(rank_, chunk_ + 1), from, count);
        come();
        return kDone;
    }

    // To the next chunk. In this order, and the sleeper in the other: one of them sees the other.
    void come() {
        Seat& own = seat(rank_);
        own.count.store(++chunk_);
        if (own.sleepers.load())
            syscall(SYS_futex, &own.count, FUTEX_WAKE, std::numeric_limits<int>::max());
    }

    int wait_for(int rank, uint32_t chunk) const {
        const int64_t began = now_ns();
        do {
            if (has_come(rank, chunk)) return kDone;
            sched_yield();
        } while (now_ns() - began < kPatienceNs);
        for (int64_t looked = began; !has_come(rank, chunk);) {
            sleep(seat(rank), chunk);
            const int64_t now = now_ns();
            if (now - looked < kLookNs) continue;
            looked = now;
            // It may have come, and gone then.
            if (!is_there(rank)) return has_come(rank, chunk) ? kDone : 1 + rank;
            if (now - began > timeout_ns_) return kLate;
        }
        return kDone;
    }

    bool has_come(int rank, uint32_t chunk) const {
        return reaches(seat(rank).count.load(), chunk);
    }

    // Counts go round.
    static bool reaches(uint32_t count, uint32_t chunk) {
        return static_cast<int32_t>(count - chunk) >= 0;
    }

    // Until somebody comes to that seat, or kLookNs. May end earlier.
    static void sleep(Seat& seat, uint32_t chunk) {
        const timespec look{0, kLookNs};
        ++seat.sleepers;
        const uint32_t seen = seat.count.load();
        if (!reaches(seen, chunk)) syscall(SYS_futex, &seat.count, FUTEX_WAIT, seen, &look);
        --seat.sleepers;
    }

    // Bytes [from, from + count) of a shard, to where they belong in rows of all ranks.
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

// Takes the seat of `rank`; `file` is closed in the end. Null where that cannot be.
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
