// The simulated GPUs: memory, and streams whose work runs in a random order that CUDA allows.
//
// No thread runs the work. Each call of the host lets the devices go on for a while. A seed decides
// which stream runs next and for how long. Work of one stream runs in its order, and only events
// order work of different streams.

#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "order.h"

constexpr int NUM_DEVICES = 2;
constexpr int SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_PITCH = 12;
constexpr int NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700;
constexpr int ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, IN_CAPTURE = 900;
constexpr std::uint64_t MEMORY_BYTES = 8ull << 30;

// The point in a stream for which a recorded event stands.
struct Mark {
    std::uint32_t stream = 0;
    bool is_done = false;
    Clock clock;
};

struct Event {
    int device;
    std::shared_ptr<Mark> mark;
};

using Run = std::function<void(std::vector<Range>&)>;  // adds what it touched

struct Queued {
    WorkP work;
    Run run;
    std::shared_ptr<Mark> waits_for{}, reaches{};
    std::chrono::steady_clock::duration pause{};
    std::chrono::steady_clock::time_point until{};
};

struct Stream {
    std::uint32_t id;
    int device;
    std::deque<Queued> queue{};
    std::vector<Queued> captured{};
    bool is_running = false, is_capturing = false, is_destroyed = false;
    Clock clock{};
};

struct Allocation {
    Address end;
    int device;  // -1: pinned memory of the host
};

// What the machine reports of itself; a test may change it.
struct Machine {
    int driver = 13000, runtime = 13020, num_devices = NUM_DEVICES;
};

class Devices {
  public:
    Devices();

    Machine machine;
    bool by_hand = false;  // only `simulation_step` and waiting calls let the device go on
    std::map<std::string, int> failing;  // what the next call of a name returns
    // (waiting stream, stream that it waits for): of all waits, and of those to leave out.
    std::set<std::pair<std::uint32_t, std::uint32_t>> waits, dropped;

    std::mutex mutex;  // of everything below
    std::map<Address, Allocation> allocated;
    std::vector<Stream*> streams;  // in the order in which they were made
    std::array<Stream*, NUM_DEVICES> legacy{};
    std::array<bool, NUM_DEVICES> has_context{};
    std::map<std::string, std::uint64_t> calls;
    std::vector<std::string> violations;
    int lost = 0;
    Accesses accesses;
    Clock host;  // what the host knows to be done

    using Lock = std::unique_lock<std::mutex>;

    Stream* new_stream(int device);
    bool has(const Stream* stream) const;
    void destroy(Stream* stream);  // its queued work still runs
    void put(Stream* stream, const std::string& name, Run run);
    std::shared_ptr<Mark> mark(Stream* stream);
    void wait(Stream* stream, const std::shared_ptr<Mark>& mark);
    void pause(Stream* stream, std::chrono::steady_clock::duration pause);
    void replay(Stream* captured_on, Stream* stream);

    void go_on(Lock& lock);                // for a random while
    void go_on(Lock& lock, int num_steps);
    void run_until(Lock& lock, const std::function<bool()>& is_over);
    void drain(Lock& lock, Stream* stream);
    void drain(Lock& lock);  // then no stream has work
    bool step(Lock& lock);

    const Allocation* find(Address address, std::uint64_t num_bytes) const;
    bool overlaps(Address address, std::uint64_t num_bytes) const;
    void lose(const std::string& why);

  private:
    void queue(Stream* stream, Queued queued);
    bool can_run(Stream* stream);
    Stream* choose(const std::vector<Stream*>& able);

    std::mt19937_64 random_;
    double go_on_chance_, change_chance_;
    bool is_even_;
    std::map<Stream*, std::uint64_t> priorities_;
    // The counts of the work of destroyed streams, by their numbers. Later streams take over the
    // numbers whose work the host knows to be done. Otherwise the clocks, which have a count for
    // each number, would make each call slower and slower.
    std::map<std::uint32_t, std::uint32_t> destroyed_;
    std::uint32_t num_streams_ = 0;
};

Devices& devices();
