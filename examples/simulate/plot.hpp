// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lines over two axes that begin at 0, as an SVG file.
#pragma once

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace simulate {

struct curve {
  std::string name;
  std::vector<std::pair<double, double>> points;
};

/// @throws std::runtime_error  naming the file that cannot be written
inline void plot(const std::filesystem::path& path, const std::string& title, const std::string& x,
                 const std::string& y, const std::vector<curve>& curves) {
  constexpr double left = 60, right = 700, top = 40, bottom = 380;
  double most_x = 0, most_y = 0;
  for (const curve& c : curves) {
    for (const auto& [px, py] : c.points) {
      most_x = std::max(most_x, px);
      most_y = std::max(most_y, py);
    }
  }
  if (most_x <= 0) most_x = 1;
  if (most_y <= 0) most_y = 1;
  std::string out =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 900 430\" "
      "font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"900\" height=\"430\" fill=\"white\"/>\n";
  const auto label = [&](double at_x, double at_y, const char* anchor, const std::string& text) {
    char position[96];
    std::snprintf(position, sizeof position, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">",
                  at_x, at_y, anchor);
    out += position + text + "</text>\n";
  };
  label((left + right) / 2, 20, "middle", title);
  label((left + right) / 2, 420, "middle", x);
  label(left, 32, "start", y);
  for (int i = 0; i <= 4; ++i) {
    char value[32];
    std::snprintf(value, sizeof value, "%.3g", most_x * i / 4);
    label(left + (right - left) * i / 4, bottom + 18, "middle", value);
    std::snprintf(value, sizeof value, "%.3g", most_y * i / 4);
    label(left - 6, bottom - (bottom - top) * i / 4 + 4, "end", value);
  }
  static constexpr const char* colours[] = {"#1b6ca8", "#c0392b", "#27864b", "#8e5ea2"};
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const std::string colour = colours[i % std::size(colours)];
    out += "<polyline fill=\"none\" stroke=\"" + colour + "\" stroke-width=\"1.5\" points=\"";
    for (const auto& [px, py] : curves[i].points) {
      char point[64];
      std::snprintf(point, sizeof point, "%.1f,%.1f ", left + (right - left) * px / most_x,
                    bottom - (bottom - top) * py / most_y);
      out += point;
    }
    out += "\"/>\n<text x=\"710\" y=\"" + std::to_string(60 + 18 * i) + "\" fill=\"" + colour +
           "\">" + curves[i].name + "</text>\n";
  }
  out += "<path d=\"M60 40V380H700\" fill=\"none\" stroke=\"black\"/>\n</svg>\n";
  std::ofstream file(path, std::ios::binary);
  file << out;
  if (!file.flush()) throw std::runtime_error("plot: cannot write " + path.string());
}

}  // namespace simulate
