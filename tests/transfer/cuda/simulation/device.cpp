// See device.h.

#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

Devices& devices() {
    static auto* made = new Devices;  // for ever, because calls arrive while the process ends
    return *made;
}

Devices::Devices() {
    const char* seed = std::getenv("KVSTOW_SIMULATION_SEED");
    random_.seed(seed ? std::strtoull(seed, nullptr, 10) : 0);
    auto one_of = [&](auto... values) {
        double all[] = {values...};
        return all[random_() % sizeof...(values)];
    };
    go_on_chance_ = one_of(0.0, 0.3, 0.8);
    change_chance_ = one_of(0.02, 0.2);
    is_even_ = random_() % 3 == 0;
    for (int device = 0; device < NUM_DEVICES; ++device) legacy[device] = new_stream(device);
}

Stream* Devices::new_stream(int device) {
    auto spare = std::find_if(destroyed_.begin(), destroyed_.end(), [&](const auto& last) {
        return host.at(last.first) >= last.second;
    });
    bool has_spare = spare != destroyed_.end();
    auto* stream = new Stream{has_spare ? spare->first : num_streams_++, device};
    if (has_spare) destroyed_.erase(spare);
    streams.push_back(stream);
    return stream;
}

bool Devices::has(const Stream* stream) const {
    return std::find(streams.begin(), streams.end(), stream) != streams.end();
}

void Devices::destroy(Stream* stream) {
    stream->is_destroyed = true;
    if (!stream->queue.empty() || stream->is_running) return;
    // It is never deleted, so no other stream gets its address.
    std::erase(streams, stream);
    priorities_.erase(stream);
    destroyed_[stream->id] = stream->clock.at(stream->id);
}

void Devices::queue(Stream* stream, Queued queued) {
    if (stream->is_capturing) {
        stream->captured.push_back(std::move(queued));
        return;
    }
    stream->clock.merge(host);
    if (queued.waits_for) stream->clock.merge(queued.waits_for->clock);
    if (queued.run) {
        auto count = stream->clock.at(stream->id) + 1;
        stream->clock.raise(stream->id, count);
        Work work = *queued.work;
        work.stream = stream->id;
        work.count = count;
        work.before = stream->clock;
        queued.work = std::make_shared<const Work>(std::move(work));
    }
    if (queued.reaches) queued.reaches->clock = stream->clock;
    stream->queue.push_back(std::move(queued));
}

void Devices::put(Stream* stream, const std::string& name, Run run) {
    queue(stream, {std::make_shared<const Work>(Work{0, 0, name, {}}), std::move(run)});
}

std::shared_ptr<Mark> Devices::mark(Stream* stream) {
    auto mark = std::make_shared<Mark>();
    mark->stream = stream->id;
    queue(stream, {nullptr, nullptr, nullptr, mark});
    return mark;
}

void Devices::wait(Stream* stream, const std::shared_ptr<Mark>& mark) {
    std::pair pair(stream->id, mark->stream);
    waits.insert(pair);
    if (!dropped.contains(pair)) queue(stream, {nullptr, nullptr, mark});
}

void Devices::pause(Stream* stream, std::chrono::steady_clock::duration pause) {
    queue(stream, {nullptr, nullptr, nullptr, nullptr, pause});
}

void Devices::replay(Stream* captured_on, Stream* stream) {
    for (const Queued& queued : captured_on->captured) queue(stream, queued);
}

bool Devices::can_run(Stream* stream) {
    if (stream->is_running || stream->queue.empty()) return false;
    Queued& next = stream->queue.front();
    if (next.waits_for && !next.waits_for->is_done) return false;
    if (next.pause.count()) {
        auto now = std::chrono::steady_clock::now();
        if (next.until.time_since_epoch().count() == 0) next.until = now + next.pause;
        return now >= next.until;
    }
    return true;
}

Stream* Devices::choose(const std::vector<Stream*>& able) {
    if (by_hand) return able.front();
    if (is_even_) return able[random_() % able.size()];
    // Priorities that change now and then starve some streams for long.
    if (static_cast<double>(random_() % 1000) < 1000 * change_chance_) priorities_.clear();
    Stream* best = nullptr;
    for (Stream* stream : able) {
        if (!priorities_.contains(stream)) priorities_[stream] = random_();
        if (!best || priorities_[stream] > priorities_[best]) best = stream;
    }
    return best;
}

bool Devices::step(Lock& lock) {
    std::vector<Stream*> able;
    for (Stream* stream : streams) {
        if (can_run(stream)) able.push_back(stream);
    }
    if (able.empty()) return false;
    Stream* stream = choose(able);
    Queued next = std::move(stream->queue.front());
    if (next.run && !lost) {
        // Without the lock, because the work may be Python, which another thread may hold up.
        stream->is_running = true;
        std::vector<Range> touched;
        lock.unlock();
        next.run(touched);
        lock.lock();
        stream->is_running = false;
        for (const Range& range : touched) {
            if (WorkP other = accesses.note(range, next.work)) {
                violations.push_back(next.work->name + " on stream " +
                                     std::to_string(next.work->stream) + ": nothing orders it and " +
                                     other->name + " on stream " + std::to_string(other->stream));
                constexpr int max_printed = 20;
                static int num_printed = 0;
                if (num_printed++ < max_printed) {
                    std::fprintf(stderr, "simulated GPU: %s\n", violations.back().c_str());
                }
                break;
            }
        }
    }
    stream->queue.pop_front();
    if (next.reaches) next.reaches->is_done = true;
    if (stream->is_destroyed) destroy(stream);
    return true;
}

void Devices::go_on(Lock& lock) {
    if (by_hand) return;
    while (static_cast<double>(random_() % 1000) < 1000 * go_on_chance_ && step(lock)) {
    }
}

void Devices::go_on(Lock& lock, int num_steps) {
    if (by_hand) return;
    for (auto left = random_() % static_cast<std::uint64_t>(num_steps); left && step(lock); --left) {
    }
}

void Devices::run_until(Lock& lock, const std::function<bool()>& is_over) {
    while (!is_over()) {
        if (step(lock)) continue;
        lock.unlock();
        usleep(50);  // another thread runs the work, or the device is paused
        lock.lock();
    }
}

void Devices::drain(Lock& lock, Stream* stream) {
    auto last = stream->clock;
    auto end = mark(stream);
    run_until(lock, [&] { return end->is_done; });
    host.merge(last);
}

void Devices::drain(Lock& lock) {
    auto is_idle = [](Stream* stream) { return stream->queue.empty() && !stream->is_running; };
    run_until(lock, [&] { return std::all_of(streams.begin(), streams.end(), is_idle); });
    for (Stream* stream : streams) host.merge(stream->clock);
    for (auto [number, count] : destroyed_) host.raise(number, count);
}

const Allocation* Devices::find(Address address, std::uint64_t num_bytes) const {
    auto next = allocated.upper_bound(address);
    if (next == allocated.begin()) return nullptr;
    const Allocation& found = std::prev(next)->second;
    return num_bytes <= found.end - address && address <= found.end ? &found : nullptr;
}

bool Devices::overlaps(Address address, std::uint64_t num_bytes) const {
    auto next = allocated.lower_bound(address + num_bytes);
    return next != allocated.begin() && std::prev(next)->second.end > address;
}

void Devices::lose(const std::string& why) {
    lost = ILLEGAL_ADDRESS;
    std::fprintf(stderr, "simulated GPU: %s\n", why.c_str());
}
