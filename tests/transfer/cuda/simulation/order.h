// Finds accesses to one memory that nothing orders. It does not depend on the order that ran.
//
// Every stream counts its work. A `Clock` has, for each stream, the number of its last work that is
// surely done. Each byte range has the work that wrote it last, and the works that read it since.
// Two accesses of which one writes need an order: the later one's clock must contain the earlier.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

using Address = std::uint64_t;

class Clock {
  public:
    std::uint32_t at(std::uint32_t stream) const {
        return stream < counts_.size() ? counts_[stream] : 0;
    }
    void raise(std::uint32_t stream, std::uint32_t count) {
        if (stream >= counts_.size()) counts_.resize(stream + 1);
        if (counts_[stream] < count) counts_[stream] = count;
    }
    void merge(const Clock& other) {
        const auto& from = other.counts_;
        if (counts_.size() < from.size()) counts_.resize(from.size());
        for (std::size_t i = 0; i < from.size(); ++i) counts_[i] = std::max(counts_[i], from[i]);
    }

  private:
    std::vector<std::uint32_t> counts_;
};

// One piece of queued work: the `count`-th of a stream, and what it runs after.
struct Work {
    std::uint32_t stream = 0, count = 0;
    std::string name;
    Clock before;

    bool is_before(const Work& other) const { return other.before.at(stream) >= count; }
};
using WorkP = std::shared_ptr<const Work>;

struct Range {
    Address begin, end;
    bool is_write;
};

class Accesses {
  public:
    // Notes an access. Returns the earlier work that nothing orders before it, or null.
    WorkP note(const Range& range, const WorkP& work) {
        if (range.begin >= range.end) return nullptr;
        WorkP found;
        split(range.begin);
        split(range.end);
        auto first = cells_.lower_bound(range.begin);
        Address covered = range.begin;
        auto cell = first;
        for (; cell != cells_.end() && cell->first < range.end; ++cell) {
            check(cell->second.writer, work, found);
            if (range.is_write) {
                for (const WorkP& reader : cell->second.readers) check(reader, work, found);
                continue;
            }
            if (cell->first > covered) cells_[covered] = {cell->first, nullptr, {work}};
            covered = cell->second.end;
            add_reader(cell->second.readers, work);
        }
        if (range.is_write) {
            cells_.erase(first, cell);
            cells_[range.begin] = {range.end, work, {}};
        } else if (covered < range.end) {
            cells_[covered] = {range.end, nullptr, {work}};
        }
        return found;
    }

    // Forgets memory that was freed.
    void forget(Address begin, Address end) {
        split(begin);
        split(end);
        cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
    }

  private:
    struct Cell {
        Address end;
        WorkP writer;
        std::vector<WorkP> readers;
    };

    static void check(const WorkP& earlier, const WorkP& work, WorkP& found) {
        if (earlier && earlier != work && !earlier->is_before(*work)) found = earlier;
    }

    static void add_reader(std::vector<WorkP>& readers, const WorkP& work) {
        // A reader that is surely done before this one adds nothing.
        std::erase_if(readers, [&](const WorkP& r) { return r == work || r->is_before(*work); });
        readers.push_back(work);
    }

    void split(Address at) {
        auto next = cells_.upper_bound(at);
        if (next == cells_.begin()) return;
        auto cell = std::prev(next);
        if (cell->first == at || cell->second.end <= at) return;
        Cell tail = cell->second;
        cell->second.end = at;
        cells_[at] = std::move(tail);
    }

    std::map<Address, Cell> cells_;
};
