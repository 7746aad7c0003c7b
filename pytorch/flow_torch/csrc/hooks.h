// What programs and PyTorch's flight recorder have called at the end of operations.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>

namespace flow {

// Hooks by their numbers, in whose order they are called. One may remove itself.
template <typename... Arguments>
class HookList {
public:
    using Hook = std::function<void(Arguments...)>;

    void add(int64_t id, Hook hook) {
        change([&](Map& hooks) { hooks[id] = std::move(hook); });
    }

    void remove(int64_t id) {
        change([&](Map& hooks) { hooks.erase(id); });
    }

    // Nobody expects a hook's error.
    void call(Arguments... arguments) const {
        if (is_empty_) return;
        std::unique_lock<std::mutex> lock(mutex_);
        const auto hooks = hooks_;
        lock.unlock();
        for (const auto& [id, hook] : *hooks) {
            try {
                hook(arguments...);
            } catch (const std::exception& error) {
                TORCH_WARN("flow: hook ", id, " of a process group failed: ", error.what());
            }
        }
    }

private:
    using Map = std::map<int64_t, Hook>;

    template <typename Change>
    void change(const Change& change) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto changed = std::make_shared<Map>(*hooks_);
        change(*changed);
        is_empty_ = changed->empty();
        hooks_ = std::move(changed);
    }

    std::atomic<bool> is_empty_{true};
    mutable std::mutex mutex_;
    std::shared_ptr<const Map> hooks_ = std::make_shared<Map>();
};

struct Hooks {
    // When an operation has failed, before whoever waits for it learns of that.
    HookList<> failed;
    // When an operation has succeeded, with its key.
    HookList<uint64_t> completed;
};

}  // namespace flow
