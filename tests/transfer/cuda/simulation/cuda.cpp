// The functions of CUDA that cupy calls, for the simulated GPUs of device.h.
//
// The driver's functions replace libcuda.so.1. The runtime's functions replace those that cupy's
// binary contains. Types are those of CUDA's ABI: statuses are int, handles and streams addresses.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "device.h"
#include "kernels.h"

#define CUDA extern "C" __attribute__((visibility("default")))

namespace {

using Size = std::size_t;
using Lock = Devices::Lock;

thread_local int context = 0;  // 0: none, else the number of the device and 1
thread_local int last_error = 0;
constexpr int HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2;
constexpr int IS_HOST = 1, IS_DEVICE = 2;
constexpr Size PAGE_BYTES = 4096, MAX_PITCH_BYTES = 0x7fffffff;
constexpr unsigned char GARBAGE = 0xdb;

int failed(int status) { return last_error = status; }

int device_now() { return context ? context - 1 : 0; }

// A call of CUDA. Most calls make the context of the thread's device, if there is none.
class Call {
  public:
    explicit Call(const char* name, bool needs_context = true)
        : all(devices()), lock(all.mutex) {
        ++all.calls[name];
        if (auto found = all.failing.find(name); found != all.failing.end()) {
            status = found->second;
            all.failing.erase(found);
            if (status == ILLEGAL_ADDRESS) all.lost = status;
            return;
        }
        if (!needs_context) return;
        if (!context) context = 1;
        all.has_context[device_now()] = true;
        status = all.lost;
        if (!status) all.go_on(lock);
        status = all.lost;
    }

    Stream* stream(void* given) {
        if (given == nullptr || given == reinterpret_cast<void*>(1)) return all.legacy[device_now()];
        auto* found = static_cast<Stream*>(given);
        return all.has(found) && !found->is_destroyed ? found : nullptr;
    }

    Devices& all;
    Lock lock;
    int status = SUCCESS;
};

#define RETURN_IF_LOST(call) \
    if (call.status) return failed(call.status)

Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

void* allocate(Call& call, Size num_bytes, int device) {
    if (num_bytes > MEMORY_BYTES) return nullptr;
    void* memory = nullptr;
    if (posix_memalign(&memory, PAGE_BYTES, num_bytes + PAGE_BYTES)) return nullptr;
    // Also behind the end, where a kernel that reads too far finds no usable address.
    std::memset(memory, GARBAGE, num_bytes + PAGE_BYTES);
    call.all.allocated[address_of(memory)] = {address_of(memory) + num_bytes, device};
    return memory;
}

// Returns whether this was allocated, on a device or not.
bool release(Call& call, void* memory, bool is_device) {
    call.all.drain(call.lock);
    auto found = call.all.allocated.find(address_of(memory));
    if (found == call.all.allocated.end() || (found->second.device >= 0) != is_device) return false;
    call.all.accesses.forget(found->first, found->second.end);
    call.all.allocated.erase(found);
    return true;
}

// -- copies ----------------------------------------------------------------------------------------

struct Rows {
    char* to;
    Size to_pitch;
    const char* origin;
    Size origin_pitch, width, height;
};

// Returns what is wrong with the ends of a copy, and whether the end on the host is pinned.
int checked(const Devices& all, const Rows& rows, int kind, bool& is_pinned) {
    if (kind != HOST_TO_DEVICE && kind != DEVICE_TO_HOST) return 21;
    is_pinned = true;
    for (Size row = 0; row < rows.height; ++row) {
        Address to = address_of(rows.to + row * rows.to_pitch);
        Address origin = address_of(rows.origin + row * rows.origin_pitch);
        const Allocation* device = all.find(kind == HOST_TO_DEVICE ? to : origin, rows.width);
        Address host = kind == HOST_TO_DEVICE ? origin : to;
        const Allocation* pinned = all.find(host, rows.width);
        if (!device || device->device < 0) return INVALID_VALUE;
        if (pinned ? pinned->device >= 0 : all.overlaps(host, rows.width)) return INVALID_VALUE;
        is_pinned = is_pinned && pinned;
    }
    return SUCCESS;
}

Run copying(const Rows& rows) {
    return [=](std::vector<Range>& touched) {
        for (Size row = 0; row < rows.height; ++row) {
            char* to = rows.to + row * rows.to_pitch;
            const char* origin = rows.origin + row * rows.origin_pitch;
            std::memcpy(to, origin, rows.width);
            touched.push_back({address_of(origin), address_of(origin) + rows.width, false});
            touched.push_back({address_of(to), address_of(to) + rows.width, true});
        }
    };
}

int copy(Call& call, const Rows& rows, int kind, void* given) {
    RETURN_IF_LOST(call);
    Stream* stream = call.stream(given);
    bool is_pinned = false;
    if (!stream) return failed(INVALID_HANDLE);
    if (int wrong = checked(call.all, rows, kind, is_pinned)) return failed(wrong);
    call.all.put(stream, "copy", copying(rows));
    if (!is_pinned) call.all.drain(call.lock, stream);  // CUDA goes through memory of its own
    return SUCCESS;
}

// -- kernels ---------------------------------------------------------------------------------------

std::mutex kernel_mutex;
int kernel_device;
constexpr Size NUM_OPEN = 64;
// Of the reads of a kernel, or of its writes.
struct Touched {
    Address begin, end;  // memory that the last one was found in
    // The last ranges, which neighbours extend. A lane touches one unit in each of a few rows, and
    // the next lane touches the neighbours of these, row by row.
    Range open[NUM_OPEN];
    Size next;  // where the neighbour of the next unit is expected
    std::vector<Range> closed;

    void close(const Range& range) {
        if (!closed.empty() && closed.back().end == range.begin) {
            closed.back().end = range.end;
        } else if (range.end) {
            closed.push_back(range);
        }
    }
};
Touched touched_by[2];

bool touch(Address address, std::uint64_t num_bytes, bool is_write) {
    Touched& touched = touched_by[is_write];
    if (num_bytes == 0 || address < touched.begin || address + num_bytes > touched.end) {
        Devices& all = devices();
        Lock lock(all.mutex);
        if (all.lost) return false;
        const Allocation* found = all.find(address, num_bytes);
        bool is_reachable = found && (found->device < 0 || found->device == kernel_device);
        if (num_bytes == 0 || !is_reachable) {
            char text[80];
            std::snprintf(text, sizeof text, "a kernel %s %llu bytes at %#llx, which it may not",
                          is_write ? "writes" : "reads", static_cast<unsigned long long>(num_bytes),
                          static_cast<unsigned long long>(address));
            all.lose(text);
            return false;
        }
        touched.begin = std::prev(all.allocated.upper_bound(address))->first;
        touched.end = found->end;
    }
    // Backwards, because the first row of a lane follows the last one of the lane before it.
    for (Size tried = NUM_OPEN; tried > 0; --tried) {
        Size at = (touched.next + tried) % NUM_OPEN;
        if (touched.open[at].end != address) continue;
        touched.open[at].end += num_bytes;
        touched.next = at + 1;
        return true;
    }
    Range& oldest = touched.open[touched.next++ % NUM_OPEN];
    touched.close(oldest);
    oldest = {address, address + num_bytes, is_write};
    return true;
}

// Returns the ranges in their order, of which neighbours are one.
std::vector<Range> joined(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& one, const Range& two) {
        return std::pair(one.is_write, one.begin) < std::pair(two.is_write, two.begin);
    });
    std::vector<Range> result;
    for (const Range& range : ranges) {
        bool is_next = !result.empty() && result.back().is_write == range.is_write &&
                       range.begin <= result.back().end;
        if (is_next) {
            result.back().end = std::max(result.back().end, range.end);
        } else {
            result.push_back(range);
        }
    }
    return result;
}

Run launching(const BoundKernel& kernel, unsigned num_ctas, unsigned num_threads, int device) {
    return [=](std::vector<Range>& touched) {
        std::lock_guard one_at_a_time(kernel_mutex);
        kernel_device = device;
        for (Touched& some : touched_by) some = {};
        run_kernel(kernel, num_ctas, num_threads, touch);
        for (Touched& some : touched_by) {
            for (Size i = 0; i < NUM_OPEN; ++i) some.close(some.open[(some.next + i) % NUM_OPEN]);
            touched.insert(touched.end(), some.closed.begin(), some.closed.end());
        }
        touched = joined(std::move(touched));
    };
}

}  // namespace

// -- the runtime: devices ----------------------------------------------------------------------------

CUDA const char* cudaGetErrorName(int status) {
    static thread_local char text[32];
    std::snprintf(text, sizeof text, "cudaError %d", status);
    return text;
}
CUDA const char* cudaGetErrorString(int) { return "of a simulated GPU"; }
CUDA int cudaGetLastError() { return std::exchange(last_error, SUCCESS); }
CUDA int cudaDriverGetVersion(int* version) { return *version = devices().machine.driver, SUCCESS; }
CUDA int cudaRuntimeGetVersion(int* version) { return *version = devices().machine.runtime, SUCCESS; }
CUDA int cudaGetDeviceCount(int* count) {
    *count = devices().machine.num_devices;
    return *count ? SUCCESS : failed(NO_DEVICE);
}

CUDA int cudaGetDevice(int* device) {
    Call call("cudaGetDevice", false);
    *device = device_now();
    return SUCCESS;
}

CUDA int cudaSetDevice(int device) {
    Call call("cudaSetDevice", false);
    if (device < 0 || device >= NUM_DEVICES) return failed(INVALID_DEVICE);
    context = device + 1;
    call.all.has_context[device] = true;  // since CUDA 12 this call makes the context
    return SUCCESS;
}

CUDA int cudaDeviceGetAttribute(int* value, int attribute, int) {
    constexpr int major = 75, minor = 76;
    *value = attribute == major ? 9 : attribute == minor ? 0 : 1;
    return SUCCESS;
}

CUDA int cudaGetDeviceProperties(void* properties, int device) {
    char* name = static_cast<char*>(properties);
    unsigned char* uuid = static_cast<unsigned char*>(properties) + 256;
    std::snprintf(name, 256, "Simulated GPU");
    std::memset(uuid, 7, 16);
    uuid[1] = static_cast<unsigned char>(device);  // cupy ends the UUID at a zero byte
    constexpr Size total_memory = 288;
    std::memcpy(name + total_memory, &MEMORY_BYTES, sizeof MEMORY_BYTES);
    return SUCCESS;
}

CUDA int cudaDeviceGetPCIBusId(char* text, int size, int device) {
    std::snprintf(text, static_cast<Size>(size), "FFFF:%02X:00.0", device);
    return SUCCESS;
}

CUDA int cudaMemGetInfo(Size* num_free, Size* num_total) {
    Call call("cudaMemGetInfo");
    *num_free = *num_total = MEMORY_BYTES;
    return SUCCESS;
}

CUDA int cudaDeviceSynchronize() {
    Call call("cudaDeviceSynchronize");
    RETURN_IF_LOST(call);
    call.all.drain(call.lock);
    return failed(call.all.lost);
}

// -- the runtime: memory -----------------------------------------------------------------------------

CUDA int cudaMalloc(void** memory, Size num_bytes) {
    Call call("cudaMalloc");
    RETURN_IF_LOST(call);
    *memory = allocate(call, num_bytes, device_now());
    return *memory ? SUCCESS : failed(OUT_OF_MEMORY);
}

CUDA int cudaFree(void* memory) {
    Call call("cudaFree");
    RETURN_IF_LOST(call);
    if (memory == nullptr) return SUCCESS;
    if (!release(call, memory, true)) return failed(INVALID_VALUE);
    std::free(memory);
    return SUCCESS;
}

CUDA int cudaHostAlloc(void** memory, Size num_bytes, unsigned) {
    Call call("cudaHostAlloc");
    RETURN_IF_LOST(call);
    *memory = allocate(call, num_bytes, -1);
    return *memory ? SUCCESS : failed(OUT_OF_MEMORY);
}

CUDA int cudaFreeHost(void* memory) {
    Call call("cudaFreeHost");
    RETURN_IF_LOST(call);
    if (!release(call, memory, false)) return failed(INVALID_VALUE);
    std::free(memory);
    return SUCCESS;
}

CUDA int cudaHostRegister(void* memory, Size num_bytes, unsigned) {
    Call call("cudaHostRegister");
    RETURN_IF_LOST(call);
    if (call.all.overlaps(address_of(memory), num_bytes)) return failed(ALREADY_REGISTERED);
    call.all.allocated[address_of(memory)] = {address_of(memory) + num_bytes, -1};
    return SUCCESS;
}

CUDA int cudaHostUnregister(void* memory) {
    Call call("cudaHostUnregister");
    RETURN_IF_LOST(call);
    return release(call, memory, false) ? SUCCESS : failed(NOT_REGISTERED);
}

struct PointerAttributes {
    int type, device;
    void *device_pointer, *host_pointer;
};

CUDA int cudaPointerGetAttributes(PointerAttributes* attributes, void* memory) {
    Call call("cudaPointerGetAttributes");
    RETURN_IF_LOST(call);
    const Allocation* found = call.all.find(address_of(memory), 1);
    *attributes = {};
    if (!found) return SUCCESS;
    bool is_host = found->device < 0;
    *attributes = {is_host ? IS_HOST : IS_DEVICE, is_host ? 0 : found->device, memory,
                   is_host ? memory : nullptr};
    return SUCCESS;
}

CUDA int cudaMemcpy(void* to, const void* origin, Size num_bytes, int kind) {
    Call call("cudaMemcpy");
    RETURN_IF_LOST(call);
    auto* begin = static_cast<const char*>(origin);
    Rows rows{static_cast<char*>(to), 0, begin, 0, num_bytes, 1};
    bool is_pinned = false;
    if (int wrong = checked(call.all, rows, kind, is_pinned)) return failed(wrong);
    Stream* stream = call.stream(nullptr);
    if (is_pinned || kind == DEVICE_TO_HOST) {
        call.all.put(stream, "copy", copying(rows));
        call.all.drain(call.lock, stream);
        return SUCCESS;
    }
    // From pageable memory: it returns once the bytes are in memory of the driver.
    auto staged = std::make_shared<std::string>(begin, num_bytes);
    call.all.put(stream, "upload", [=](std::vector<Range>& touched) {
        std::memcpy(to, staged->data(), num_bytes);
        touched.push_back({address_of(to), address_of(to) + num_bytes, true});
    });
    return SUCCESS;
}

CUDA int cudaMemcpyAsync(void* to, const void* origin, Size num_bytes, int kind, void* stream) {
    Call call("cudaMemcpyAsync");
    Rows rows{static_cast<char*>(to), 0, static_cast<const char*>(origin), 0, num_bytes, 1};
    return copy(call, rows, kind, stream);
}

CUDA int cudaMemcpy2DAsync(void* to, Size to_pitch, const void* origin, Size origin_pitch,
                           Size width, Size height, int kind, void* stream) {
    Call call("cudaMemcpy2DAsync");
    if (to_pitch > MAX_PITCH_BYTES || origin_pitch > MAX_PITCH_BYTES || width > to_pitch ||
        width > origin_pitch) {
        return failed(INVALID_PITCH);
    }
    Rows rows{static_cast<char*>(to),
              to_pitch,
              static_cast<const char*>(origin),
              origin_pitch,
              width,
              height};
    return copy(call, rows, kind, stream);
}

CUDA int cudaMemsetAsync(void* memory, int value, Size num_bytes, void* given) {
    Call call("cudaMemsetAsync");
    RETURN_IF_LOST(call);
    Stream* stream = call.stream(given);
    const Allocation* found = call.all.find(address_of(memory), num_bytes);
    if (!stream || !found || found->device < 0) return failed(INVALID_VALUE);
    call.all.put(stream, "memset", [=](std::vector<Range>& touched) {
        std::memset(memory, value, num_bytes);
        touched.push_back({address_of(memory), address_of(memory) + num_bytes, true});
    });
    return SUCCESS;
}

// -- the runtime: streams and events -----------------------------------------------------------------

CUDA int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
    Call call("cudaStreamCreateWithPriority");
    RETURN_IF_LOST(call);
    *stream = call.all.new_stream(device_now());
    return SUCCESS;
}

CUDA int cudaStreamDestroy(void* given) {
    Call call("cudaStreamDestroy", false);
    Stream* stream = call.stream(given);
    if (!stream) return failed(INVALID_HANDLE);
    call.all.destroy(stream);
    return SUCCESS;
}

CUDA int cudaStreamSynchronize(void* given) {
    Call call("cudaStreamSynchronize");
    RETURN_IF_LOST(call);
    Stream* stream = call.stream(given);
    if (!stream) return failed(INVALID_HANDLE);
    call.all.drain(call.lock, stream);
    return failed(call.all.lost);
}

CUDA int cudaStreamIsCapturing(void* given, int* is_capturing) {
    Call call("cudaStreamIsCapturing");
    RETURN_IF_LOST(call);
    Stream* stream = call.stream(given);
    if (!stream) return failed(INVALID_HANDLE);
    *is_capturing = stream->is_capturing;
    return SUCCESS;
}

CUDA int cudaStreamWaitEvent(void* given, Event* event, unsigned) {
    Call call("cudaStreamWaitEvent");
    RETURN_IF_LOST(call);
    Stream* stream = call.stream(given);
    if (!stream) return failed(INVALID_HANDLE);
    if (event->mark) call.all.wait(stream, event->mark);
    return SUCCESS;
}

CUDA int cudaEventCreateWithFlags(Event** event, unsigned) {
    Call call("cudaEventCreateWithFlags");
    RETURN_IF_LOST(call);
    *event = new Event{device_now(), nullptr};
    return SUCCESS;
}

CUDA int cudaEventDestroy(Event* event) {
    Call call("cudaEventDestroy", false);
    delete event;
    return SUCCESS;
}

CUDA int cudaEventRecord(Event* event, void* given) {
    Call call("cudaEventRecord");
    RETURN_IF_LOST(call);
    Stream* stream = call.stream(given);
    if (!stream || stream->device != event->device) return failed(INVALID_HANDLE);
    event->mark = call.all.mark(stream);
    return SUCCESS;
}

CUDA int cudaEventQuery(Event* event) {
    Call call("cudaEventQuery");
    RETURN_IF_LOST(call);
    constexpr int max_steps = 64;  // so that a host that only polls gets somewhere
    call.all.go_on(call.lock, max_steps);
    if (call.all.lost) return failed(call.all.lost);
    if (!event->mark) return SUCCESS;
    if (!event->mark->is_done) return failed(NOT_READY);
    call.all.host.merge(event->mark->clock);
    return SUCCESS;
}

CUDA int cudaEventSynchronize(Event* event) {
    Call call("cudaEventSynchronize");
    RETURN_IF_LOST(call);
    auto mark = event->mark;
    if (!mark) return SUCCESS;
    call.all.run_until(call.lock, [&] { return mark->is_done; });
    call.all.host.merge(mark->clock);
    return failed(call.all.lost);
}

// -- the driver ----------------------------------------------------------------------------------------

CUDA int cuGetErrorName(int status, const char** text) {
    return *text = cudaGetErrorName(status), SUCCESS;
}
CUDA int cuGetErrorString(int status, const char** text) {
    return *text = cudaGetErrorString(status), SUCCESS;
}

CUDA int cuCtxGetCurrent(void** current) {
    Call call("cuCtxGetCurrent", false);
    *current = reinterpret_cast<void*>(static_cast<Size>(context));
    return SUCCESS;
}

CUDA int cuCtxSetCurrent(void* given) {
    Call call("cuCtxSetCurrent", false);
    context = static_cast<int>(reinterpret_cast<Size>(given));
    return SUCCESS;
}

CUDA int cuCtxGetDevice(int* device) { return *device = device_now(), SUCCESS; }

CUDA int cuModuleLoadData(void** module, const void* image) {
    Call call("cuModuleLoadData");
    const auto* header = static_cast<const unsigned char*>(image);
    constexpr unsigned char machine_cuda = 190;
    if (std::memcmp(header, "\x7f"
                            "ELF",
                    4) != 0 ||
        header[18] != machine_cuda) {
        return failed(209);
    }
    *module = reinterpret_cast<void*>(static_cast<Size>(device_now()) + 1);
    return SUCCESS;
}
CUDA int cuModuleUnload(void*) { return SUCCESS; }

// A function belongs to the device that its module was loaded on.
struct Function {
    std::string name;
    int device;
};

CUDA int cuModuleGetFunction(Function** function, void* module, const char* name) {
    *function = new Function{name, static_cast<int>(reinterpret_cast<Size>(module)) - 1};
    return SUCCESS;
}
CUDA int cuFuncGetAttribute(int* value, int, void*) { return *value = 40, SUCCESS; }

CUDA int cuLaunchKernel(Function* function, unsigned grid, unsigned, unsigned, unsigned block,
                        unsigned, unsigned, unsigned, void* given, void** arguments, void**) {
    Call call("cuLaunchKernel");
    RETURN_IF_LOST(call);
    Stream* stream = call.stream(given);
    if (!stream || stream->device != device_now() || function->device != device_now()) {
        return failed(INVALID_HANDLE);
    }
    if (grid == 0 || block == 0 || block > 1024) return failed(INVALID_VALUE);
    BoundKernel kernel = bind_kernel(function->name, arguments);
    if (!kernel.lane) return failed(500);
    call.all.put(stream, function->name, launching(kernel, grid, block, stream->device));
    return SUCCESS;
}

// -- for the tests -------------------------------------------------------------------------------------

// Queues a callback that touches `ranges`, for example an operation of torch.
CUDA void simulation_queue(void* stream, void (*run)(std::uint64_t), std::uint64_t number,
                           const Range* ranges, Size num_ranges) {
    Call call("simulation_queue");
    std::vector<Range> touches(ranges, ranges + num_ranges);
    call.all.put(call.stream(stream), "torch", [=](std::vector<Range>& touched) {
        run(number);
        touched = touches;
    });
}

CUDA void simulation_pause(void* stream, std::uint64_t microseconds) {
    Call call("simulation_pause");
    call.all.pause(call.stream(stream), std::chrono::microseconds(microseconds));
}

CUDA void simulation_capture(void* stream, int is_capturing) {
    Call call("simulation_capture");
    call.stream(stream)->is_capturing = is_capturing;
}

CUDA void simulation_replay(void* captured_on, void* stream) {
    Call call("simulation_replay");
    call.all.replay(call.stream(captured_on), call.stream(stream));
}

// Does what only a restart of the process would do: ends the loss of the devices, and forgets the
// work that is queued, the memory that is pinned and the calls that were to fail.
CUDA void simulation_repair() {
    Call call("simulation_repair", false);
    call.all.drain(call.lock);  // while lost, so that nothing of it runs
    std::erase_if(call.all.allocated, [](const auto& entry) { return entry.second.device < 0; });
    call.all.accesses = {};
    call.all.failing.clear();
    call.all.lost = last_error = SUCCESS;
}

CUDA int simulation_has_context(int device) { return devices().has_context.at(device); }

// Forgets the contexts, also that of this thread.
CUDA void simulation_forget_contexts() {
    Lock lock(devices().mutex);
    devices().has_context = {};
    context = 0;
}

// Lets the device go on only when a waiting call or `simulation_step` says so.
CUDA void simulation_by_hand(int by_hand) {
    Lock lock(devices().mutex);
    devices().by_hand = by_hand;
}

// Runs the next work of the first stream that can go on; returns whether there was one.
CUDA int simulation_step() {
    Lock lock(devices().mutex);
    return devices().step(lock);
}

// Lets the next call of a function fail; with an illegal address the device is lost.
CUDA void simulation_fail(const char* name, int status) {
    Lock lock(devices().mutex);
    devices().failing[name] = status;
}

CUDA void simulation_forget_failures() {
    Lock lock(devices().mutex);
    devices().failing.clear();
}

CUDA void simulation_machine(int driver, int runtime, int num_devices) {
    Lock lock(devices().mutex);
    devices().machine = {driver, runtime, num_devices};
}

// Leaves out the waits of one stream for another, or none.
CUDA void simulation_drop(int stream, int awaited) {
    Lock lock(devices().mutex);
    devices().dropped.clear();
    if (stream >= 0) devices().dropped.insert({stream, awaited});
}

CUDA int simulation_stream(void* given) {
    Call call("simulation_stream", false);
    return static_cast<int>(call.stream(given)->id);
}

// Returns the memory that is allocated or pinned.
CUDA std::uint64_t simulation_allocated() {
    Lock lock(devices().mutex);
    std::uint64_t sum = 0;
    for (const auto& [begin, found] : devices().allocated) sum += found.end - begin;
    return sum;
}

namespace {
Size written(const std::string& text, char* to, Size size) {
    std::snprintf(to, size, "%s", text.c_str());
    return text.size();
}
}  // namespace

// Write what happened since the last such question, a line each.
CUDA Size simulation_calls(char* to, Size size) {
    Lock lock(devices().mutex);
    std::string text;
    for (const auto& [name, count] : std::exchange(devices().calls, {})) {
        text += name + " " + std::to_string(count) + "\n";
    }
    return written(text, to, size);
}

CUDA Size simulation_waits(char* to, Size size) {
    Lock lock(devices().mutex);
    std::string text;
    for (const auto& [stream, awaited] : std::exchange(devices().waits, {})) {
        text += std::to_string(stream) + " " + std::to_string(awaited) + "\n";
    }
    return written(text, to, size);
}

CUDA Size simulation_violations(char* to, Size size) {
    Lock lock(devices().mutex);
    std::string text;
    for (const auto& line : std::exchange(devices().violations, {})) text += line + "\n";
    return written(text, to, size);
}
