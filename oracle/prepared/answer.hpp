// What a rank of a foreign program handed in, looked at as files and not yet as results:
//
//   rank0.out.safetensors                     all of its tensors, with the case's digest, or
//   rank0.y.npy  rank0.shot3.grad.x.npy ...   arrays of numpy, a '.' where the name has a '/', and
//   rank0.out.json                            {"case": digest}, which numpy's format has no place
//   for
//
// or some in one form and the others in the other. numpy has no bf16: its bits are handed in as
// <u2.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/tensors/npy.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof::prepared {

// "shot3/grad.x" of rank 0 is rank0.shot3.grad.x.npy.
std::string npy_file(int rank, const std::string& tensor);
std::string card_file(int rank);  // "rank0.out.json"
// Whether a file of that name is a part of some rank's answer.
bool is_answer(std::string_view file);
// Names of those that lie in a folder, sorted.
std::vector<std::string> answer_files(const std::string& folder);

class Answer {
 public:
  // False: nothing of the rank is there.
  static bool is_there(const std::string& folder, int rank);
  // Throws BadInput: a file that breaks its format, a tensor in two files, arrays without their
  // card.
  Answer(const std::string& folder, int rank);

  // What the rank says of itself, with the file that says it.
  struct Card {
    std::string path;
    tensors::Metadata metadata;
  };
  const std::vector<Card>& cards() const { return cards_; }
  std::vector<const tensors::FileTensor*> tensors() const;
  const tensors::FileTensor* find(const std::string& name) const;  // null where there is none
  // The file that holds a tensor, or that would.
  std::string path_of(const std::string& name) const;
  // BadInput where a file was changed since it was opened.
  void require_whole() const;

 private:
  struct Numpy {
    Numpy(const std::string& path, const std::string& name);
    tensors::NpyFile file;
    tensors::FileTensor tensor;
  };
  void read_array(const std::string& path, const std::string& name);
  void read_card(const std::string& path);

  std::string folder_;
  int rank_;
  std::unique_ptr<tensors::SafetensorsFile> file_;
  std::map<std::string, std::unique_ptr<Numpy>> arrays_;
  std::vector<Card> cards_;
};

}  // namespace shardproof::prepared
