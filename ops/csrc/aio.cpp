// Reads and writes of files that go on while the caller computes, with several pieces of a request at the disk at a time.
//
// A plain C interface; ops/aio.py is the only caller. The kernel is asked by raw system calls, so that no library has to be
// there: by io_uring, else by Linux AIO, else by threads that call pread and pwrite. Which of them works is known only at
// run time: containers often forbid io_uring, and systems limit the number of AIO requests.
//
// A request is cut into pieces. Callers put pieces into a queue; threads of the queue take them out. With io_uring and AIO
// that is one thread, which hands pieces to the kernel as long as there is room, and waits for results. It looks at the
// queue again with every result, so a new request waits for one piece at most, and nothing has to wake it.
//
// Files are opened twice, past the page cache (O_DIRECT) and through it. A piece goes past it if its place in memory, its
// place in the file and its length are multiples of BLOCK; the kernel may still say EINVAL, and then it goes through.

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#if defined(__linux__) && __has_include(<linux/aio_abi.h>)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#define HAS_AIO 1
#endif

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_enter)  // Linux 5.6, the first with plain reads and writes
#define HAS_URING 1
#endif
#endif

namespace {

enum Backend : int32_t { URING = 0, AIO = 1, THREADS = 2 };

constexpr int64_t BLOCK = 4096;  // no disk or file system in use asks direct access to be aligned to more
constexpr int THREAD_COUNT = 8;  // of THREADS

struct Request {
    int64_t pieces;  // that are not finished
    int error;       // errno of the first piece that failed, or 0
};

struct Piece {
    Request* request;
    int direct;  // file past the page cache, or -1
    int cached;  // the same file through it
    bool write;
    char* buffer;
    int64_t bytes;
    int64_t offset;

    bool past_cache() const {
        return direct >= 0 && (reinterpret_cast<intptr_t>(buffer) | bytes | offset) % BLOCK == 0;
    }
    int file() const { return past_cache() ? direct : cached; }

    // Take note of what the kernel said: bytes done, or minus errno. -1 if the rest has to be tried, else the final errno.
    int advance(int64_t result) {
        if (result > 0) {
            buffer += result, offset += result, bytes -= result;
            return bytes > 0 ? -1 : 0;
        }
        if (result == -EINTR || result == -EAGAIN) return -1;
        if (result == -EINVAL && past_cache()) {
            direct = -1;
            return -1;
        }
        if (result == 0) return write ? EIO : ENODATA;  // the file is shorter than that
        return int(-result);
    }
};

// What the kernel does for one thread: pieces go in by a number, results come out with it.
class Ring {
   public:
    using Result = std::function<void(int slot, int64_t result)>;
    virtual ~Ring() = default;
    virtual void start(int slot, const Piece& piece) = 0;  // the kernel is told at the next turn
    virtual int turn(const Result& result) = 0;            // tell it, wait for a result; errno if it does not work at all
};

// -- io_uring ----------------------------------------------------------------------------------------------------------

#ifdef HAS_URING
class Uring : public Ring {
   public:
    static std::unique_ptr<Ring> make(unsigned depth) {
        auto ring = std::unique_ptr<Uring>(new Uring(depth));
        if (!ring->entries) return nullptr;
        bool works = false;  // a sandbox may allow to set it up and forbid to use it
        ring->add(IORING_OP_NOP, 0);
        ring->turn([&](int, int64_t result) { works = result == 0; });
        return works ? std::move(ring) : nullptr;
    }

    ~Uring() override {
        if (entries) munmap(entries, entry_bytes);
        if (shared) munmap(shared, shared_bytes);
        if (ring >= 0) close(ring);
    }

    void start(int slot, const Piece& piece) override {
        io_uring_sqe& entry = add(piece.write ? IORING_OP_WRITE : IORING_OP_READ, slot);
        entry.fd = piece.file();
        entry.addr = reinterpret_cast<uint64_t>(piece.buffer);
        entry.len = uint32_t(piece.bytes);
        entry.off = uint64_t(piece.offset);
    }

    int turn(const Result& result) override {
        const long taken = syscall(__NR_io_uring_enter, ring, untold, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
        if (taken > 0) untold -= unsigned(taken);
        unsigned head = *done_head;
        while (head != __atomic_load_n(done_tail, __ATOMIC_ACQUIRE)) {
            const io_uring_cqe done = done_entries[head & done_mask];
            __atomic_store_n(done_head, ++head, __ATOMIC_RELEASE);
            result(int(done.user_data), done.res);
        }
        return 0;
    }

   private:
    explicit Uring(unsigned depth) {
        io_uring_params params{};
        ring = int(syscall(__NR_io_uring_setup, depth, &params));
        const unsigned wanted = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
        if (ring < 0 || (params.features & wanted) != wanted) return;
        const size_t todo_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const size_t done_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        shared_bytes = todo_bytes > done_bytes ? todo_bytes : done_bytes;
        entry_bytes = params.sq_entries * sizeof(io_uring_sqe);
        if (!(shared = map(shared_bytes, IORING_OFF_SQ_RING))) return;
        char* base = static_cast<char*>(shared);
        todo_tail = reinterpret_cast<unsigned*>(base + params.sq_off.tail);
        todo_mask = *reinterpret_cast<unsigned*>(base + params.sq_off.ring_mask);
        todo_order = reinterpret_cast<unsigned*>(base + params.sq_off.array);
        done_head = reinterpret_cast<unsigned*>(base + params.cq_off.head);
        done_tail = reinterpret_cast<unsigned*>(base + params.cq_off.tail);
        done_mask = *reinterpret_cast<unsigned*>(base + params.cq_off.ring_mask);
        done_entries = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
        entries = static_cast<io_uring_sqe*>(map(entry_bytes, IORING_OFF_SQES));
    }

    void* map(size_t bytes, off_t what) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
        return memory == MAP_FAILED ? nullptr : memory;
    }

    // There is always room: never more pieces are started than the ring is deep.
    io_uring_sqe& add(uint8_t operation, int slot) {
        const unsigned tail = *todo_tail, index = tail & todo_mask;
        std::memset(&entries[index], 0, sizeof(io_uring_sqe));
        entries[index].opcode = operation;
        entries[index].user_data = uint64_t(slot);
        todo_order[index] = index;
        __atomic_store_n(todo_tail, tail + 1, __ATOMIC_RELEASE);  // read by the kernel in `turn`, on this thread
        ++untold;
        return entries[index];
    }

    int ring = -1;
    unsigned untold = 0;  // entries that the kernel has not taken yet
    void* shared = nullptr;
    io_uring_sqe* entries = nullptr;
    size_t shared_bytes = 0, entry_bytes = 0;
    unsigned *todo_tail, *todo_order, *done_head, *done_tail;
    unsigned todo_mask, done_mask;
    io_uring_cqe* done_entries;
};
#endif

// -- Linux AIO ---------------------------------------------------------------------------------------------------------

#ifdef HAS_AIO
class Aio : public Ring {
   public:
    static std::unique_ptr<Ring> make(unsigned depth) {
        auto ring = std::unique_ptr<Aio>(new Aio(depth));
        timespec now{};
        const bool works = syscall(__NR_io_setup, depth, &ring->context) == 0 &&
                           syscall(__NR_io_submit, ring->context, 0, nullptr) == 0 &&
                           syscall(__NR_io_getevents, ring->context, 0, 1, ring->events.data(), &now) == 0;
        return works ? std::move(ring) : nullptr;
    }

    ~Aio() override {
        if (context) syscall(__NR_io_destroy, context);
    }

    void start(int slot, const Piece& piece) override {
        iocb& block = blocks[size_t(slot)];
        block = iocb{};
        block.aio_data = uint64_t(slot);
        block.aio_lio_opcode = piece.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = uint32_t(piece.file());
        block.aio_buf = reinterpret_cast<uint64_t>(piece.buffer);
        block.aio_nbytes = uint64_t(piece.bytes);
        block.aio_offset = piece.offset;
        untold.push_back(&block);
    }

    int turn(const Result& result) override {
        if (!untold.empty()) {
            const long taken = syscall(__NR_io_submit, context, long(untold.size()), untold.data());
            if (taken > 0) {
                untold.erase(untold.begin(), untold.begin() + taken);
                running += taken;
            } else if (taken < 0 && errno != EAGAIN && errno != EINTR) {  // it speaks of the first one
                const int error = errno, slot = int(untold.front()->aio_data);
                untold.erase(untold.begin());
                result(slot, -error);
            }
        }
        if (!running) {  // not one was taken
            std::this_thread::yield();
            return 0;
        }
        const long count = syscall(__NR_io_getevents, context, 1, long(events.size()), events.data(), nullptr);
        if (count < 0) return errno == EINTR ? 0 : errno;
        running -= count;
        for (long index = 0; index < count; ++index) {
            const io_event event = events[size_t(index)];
            result(int(event.data), event.res);
        }
        return 0;
    }

   private:
    explicit Aio(unsigned depth) : blocks(depth), events(depth) {}

    aio_context_t context = 0;
    std::vector<iocb> blocks;
    std::vector<io_event> events;
    std::vector<iocb*> untold;
    long running = 0;
};
#endif

std::unique_ptr<Ring> make_ring(Backend backend, unsigned depth) {
#ifdef HAS_URING
    if (backend == URING) return Uring::make(depth);
#endif
#ifdef HAS_AIO
    if (backend == AIO) return Aio::make(depth);
#endif
    (void)backend, (void)depth;
    return nullptr;
}

// -- the queue ---------------------------------------------------------------------------------------------------------

class Queue {
   public:
    Queue(std::unique_ptr<Ring> kernel, int depth, int64_t piece_bytes)
        : ring(std::move(kernel)), depth(depth), piece_bytes(piece_bytes) {
        sigset_t all, before;  // signals are for the program's own threads
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int index = 0; index < (ring ? 1 : THREAD_COUNT); ++index)
            threads.emplace_back(ring ? &Queue::drive : &Queue::call, this);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // What has not begun is cancelled, the rest is waited for.
    ~Queue() {
        {
            std::lock_guard<std::mutex> guard(lock);
            closing = true;
        }
        work.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    int64_t submit(Piece whole) {
        std::lock_guard<std::mutex> guard(lock);
        Request& request = requests[++last];
        request = Request{(whole.bytes + piece_bytes - 1) / piece_bytes, 0};
        whole.request = &request;
        for (int64_t done = 0; done < whole.bytes; done += piece_bytes) {
            Piece piece = whole;
            piece.buffer += done, piece.offset += done;
            piece.bytes = whole.bytes - done < piece_bytes ? whole.bytes - done : piece_bytes;
            waiting.push_back(piece);
        }
        work.notify_all();
        return last;
    }

    int wait(int64_t ticket) {
        std::unique_lock<std::mutex> guard(lock);
        const auto found = requests.find(ticket);
        if (found == requests.end()) return EINVAL;
        Request& request = found->second;  // stays where it is, whatever else is put in
        finished.wait(guard, [&] { return request.pieces == 0; });
        const int error = request.error;
        requests.erase(ticket);
        return error;
    }

    bool done(int64_t ticket) {
        std::lock_guard<std::mutex> guard(lock);
        const auto found = requests.find(ticket);
        return found == requests.end() || found->second.pieces == 0;
    }

   private:
    // The next piece; false if there is none, or with `patient` if there will be none.
    bool take(Piece* piece, bool patient) {
        std::unique_lock<std::mutex> guard(lock);
        for (;;) {
            if (patient) work.wait(guard, [&] { return closing || !waiting.empty(); });
            if (waiting.empty()) return false;
            *piece = waiting.front();
            waiting.pop_front();
            if (!piece->request->error && !closing) return true;
            end(*piece, ECANCELED);
        }
    }

    void finish(const Piece& piece, int error) {
        std::lock_guard<std::mutex> guard(lock);
        end(piece, error);
    }

    void end(const Piece& piece, int error) {
        if (!piece.request->error) piece.request->error = error;
        if (--piece.request->pieces == 0) finished.notify_all();
    }

    // The thread of THREADS.
    void call() {
        Piece piece;
        while (take(&piece, true)) {
            int error = -1;
            while (error < 0) {
                const size_t bytes = size_t(piece.bytes);
                const ssize_t done = piece.write ? pwrite(piece.file(), piece.buffer, bytes, piece.offset)
                                                 : pread(piece.file(), piece.buffer, bytes, piece.offset);
                error = piece.advance(done < 0 ? -errno : done);
            }
            finish(piece, error);
        }
    }

    // The thread of the others.
    void drive() {
        std::vector<Piece> slots{size_t(depth)};
        std::vector<bool> busy(size_t(depth), false);
        std::vector<int> spare;
        for (int slot = 0; slot < depth; ++slot) spare.push_back(slot);
        int broken = 0;
        while (!broken) {
            while (!spare.empty() && take(&slots[size_t(spare.back())], int(spare.size()) == depth)) {
                ring->start(spare.back(), slots[size_t(spare.back())]);
                busy[size_t(spare.back())] = true;
                spare.pop_back();
            }
            if (int(spare.size()) == depth) return;
            broken = ring->turn([&](int slot, int64_t result) {
                Piece& piece = slots[size_t(slot)];
                const int error = piece.advance(result);
                if (error < 0) return ring->start(slot, piece);
                finish(piece, error);
                busy[size_t(slot)] = false;
                spare.push_back(slot);
            });
        }
        // The kernel does not talk to us any more, which has no known cause: nobody shall wait for ever.
        for (int slot = 0; slot < depth; ++slot)
            if (busy[size_t(slot)]) finish(slots[size_t(slot)], broken);
        Piece piece;
        while (take(&piece, true)) finish(piece, broken);
    }

    std::unique_ptr<Ring> ring;  // null for THREADS
    const int depth;
    const int64_t piece_bytes;
    std::mutex lock;  // of everything below but the threads
    std::condition_variable work, finished;
    std::deque<Piece> waiting;
    std::unordered_map<int64_t, Request> requests;  // by ticket, until waited for
    int64_t last = 0;
    bool closing = false;
    std::vector<std::thread> threads;
};

}  // namespace

extern "C" {

// A queue with at most `depth` pieces of `piece_bytes` at the kernel; null if that back end does not work here.
void* zerorun_io_open(int32_t backend, int32_t depth, int64_t piece_bytes) {
    try {
        auto ring = make_ring(Backend(backend), unsigned(depth));
        if (!ring && backend != THREADS) return nullptr;
        return new Queue(std::move(ring), depth, piece_bytes);
    } catch (const std::exception&) {  // no memory, or no thread
        return nullptr;
    }
}

// Begin to move `bytes` > 0 between memory and the file from `offset` on. `direct` may be -1. A ticket, or minus errno.
int64_t zerorun_io_submit(
    void* queue, int32_t direct, int32_t cached, void* buffer, int64_t bytes, int64_t offset, int32_t write) {
    try {
        const Piece whole{nullptr, direct, cached, write != 0, static_cast<char*>(buffer), bytes, offset};
        return static_cast<Queue*>(queue)->submit(whole);
    } catch (const std::exception&) {
        return -ENOMEM;
    }
}

// Wait for a ticket, once: 0 or errno.
int32_t zerorun_io_wait(void* queue, int64_t ticket) { return static_cast<Queue*>(queue)->wait(ticket); }

// Whether waiting for it would take no time.
int32_t zerorun_io_done(void* queue, int64_t ticket) { return static_cast<Queue*>(queue)->done(ticket); }

// Nobody may wait any more.
void zerorun_io_close(void* queue) { delete static_cast<Queue*>(queue); }
}
