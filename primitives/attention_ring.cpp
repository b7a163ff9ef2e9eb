// The ring. At step s rank r holds the keys of rank r - s and sends them on while it computes.
#include "primitives/attention.hpp"

namespace shardproof::primitives {
namespace {

// Keys, then values, of one rank: one message a hop.
struct KeysAndValues {
  Values k, v;
  KeysAndValues(const View& keys, const View& values)
      : k(to_doubles(keys)), v(to_doubles(values)) {}
  KeysAndValues(const View& message, size_t keys) : k(to_doubles(message)) {
    v.assign(k.begin() + int64_t(keys), k.end());
    k.resize(keys);
  }
};

void put(const View& message, std::span<const double> k, std::span<const double> v) {
  write(message.narrow(0, 0, int64_t(k.size())), k);
  write(message.narrow(0, int64_t(k.size()), int64_t(v.size())), v);
}

int64_t message(const AttentionSaved& saved) { return saved.k.elements() + saved.v.elements(); }

}  // namespace

Communicator& AttentionRing::ring(ContextRank& c) { return c.cp; }

std::vector<Label> AttentionRing::keys_of(ContextRank& c, int owner) {
  return core_->keys(c.context, owner);
}

void AttentionRing::attend(ContextRank& c, const AttentionSaved& saved, Softmax& sum) {
  Communicator& group = ring(c);
  const int p = group.size(), me = group.rank(), steps = steps_forward(p);
  Turning kv(c.rank, c.storage, {message(saved)});
  put(kv.here, to_doubles(saved.k), to_doubles(saved.v));
  for (int step = 0; step < steps; ++step) {
    const bool goes_on = step + 1 < steps;
    const Ticket hop = goes_on ? group.shift(kv.here, kv.next, direction()) : Ticket{};
    const int owner = modulo(me - direction() * step, p);
    const auto labels = keys_of(c, owner);
    const KeysAndValues held(kv.here, size_t(saved.k.elements()));
    saved.pass->add(sum, saved.pass->block(labels, me, owner, p, step), held.k, held.v);
    if (!goes_on) break;
    group.wait(hop);
    kv.turn();
  }
}

// dK, dV of an owner's keys travel with these keys: what arrives at step s is their sum over the
// ranks owner .. me-1, the own part is added, and after p hops the whole sum is home.
void AttentionRing::differentiate(ContextRank& c, const AttentionSaved& saved, const Incoming& in,
                                  Outgoing& out) {
  Communicator& group = ring(c);
  const int p = group.size(), me = group.rank();
  const size_t keys = size_t(saved.k.elements());
  Turning kv(c.rank, c.storage, {message(saved)}), dkv(c.rank, c.wire, {message(saved)});
  put(kv.here, to_doubles(saved.k), to_doubles(saved.v));
  Ticket arriving{};
  for (int step = 0; step < p; ++step) {
    const bool goes_on = step + 1 < p;
    const Ticket hop = goes_on ? group.shift(kv.here, kv.next, direction()) : Ticket{};
    const int owner = modulo(me - direction() * step, p);
    const auto labels = keys_of(c, owner);
    const KeysAndValues held =
        multiplies_arrived() ? KeysAndValues(kv.here, keys) : KeysAndValues(saved.k, saved.v);
    Values dk(saved.k.elements()), dv(saved.v.elements());
    saved.pass->add_gradients(saved.pass->block(labels, me, owner, p, step), in.rows, held.k,
                              held.v, in.g, out.q, dk, dv);
    if (step > 0) {
      group.wait(arriving);
      dkv.turn();
      const KeysAndValues before(dkv.here, keys);
      for (size_t i = 0; i < dk.size(); ++i) dk[i] = saved.pass->kept(before.k[i] + dk[i]);
      for (size_t i = 0; i < dv.size(); ++i) dv[i] = saved.pass->kept(before.v[i] + dv[i]);
    }
    put(dkv.here, dk, dv);
    const int onward = gradient_hop(step, p);
    if (onward != 0) arriving = group.shift(dkv.here, dkv.next, onward);
    if (goes_on) {
      group.wait(hop);
      kv.turn();
    } else if (onward != 0) {
      group.wait(arriving);
      dkv.turn();
    }
  }
  const KeysAndValues sum(dkv.here, keys);
  out.k = sum.k, out.v = sum.v;
}

}  // namespace shardproof::primitives
