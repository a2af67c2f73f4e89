// SPDX-License-Identifier: Apache-2.0
/// @file
/// A plot as SVG: lines through points, the x axis logarithmic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fidelity {

struct series {
  std::string name;
  std::vector<std::pair<double, double>> points;  ///< x above zero
  std::vector<std::string> labels = {};           ///< of the points; none: empty
};

/// Text between tags.
inline std::string svg_escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  }
  return out;
}

/// Where the ticks of an axis stand: 1, 2 and 5 times powers of ten within [low, high].
inline std::vector<double> log_ticks(double low, double high) {
  std::vector<double> out;
  for (int power = static_cast<int>(std::floor(std::log10(low))); std::pow(10, power) <= high;
       ++power) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      const double at = digit * std::pow(10, power);
      if (at >= low && at <= high) out.push_back(at);
    }
  }
  return out;
}

/// From one tick of a linear axis to the next: 1, 2 or 5 times a power of ten.
inline double linear_step(double low, double high) {
  const double step = std::pow(10, std::floor(std::log10((high - low) / 4)));
  for (const double factor : {5.0, 2.0}) {
    if (step * factor <= (high - low) / 4) return step * factor;
  }
  return step;
}

/// Where the ticks of a linear axis stand: four to nine of them, at whole multiples of the step,
/// within [low, high].
inline std::vector<double> linear_ticks(double low, double high) {
  const double step = linear_step(low, high);
  std::vector<double> out;
  for (auto i = static_cast<std::int64_t>(std::ceil(low / step));; ++i) {
    const double at = static_cast<double>(i) * step;
    if (at > high) return out;
    out.push_back(at);
  }
}

/// @param note  a line below the title
/// @throws std::invalid_argument  without a point, or with one whose x is not above zero
inline std::string svg_plot(const std::string& title, const std::string& note,
                            const std::string& x_name, const std::string& y_name,
                            const std::vector<series>& lines) {
  double low_x = 0;
  double high_x = 0;
  double low_y = 0;
  double high_y = 0;
  bool first = true;
  for (const series& line : lines) {
    for (const auto& [x, y] : line.points) {
      if (!(x > 0)) throw std::invalid_argument("svg_plot: x is not above zero in " + line.name);
      low_x = first ? x : std::min(low_x, x);
      high_x = first ? x : std::max(high_x, x);
      low_y = first ? y : std::min(low_y, y);
      high_y = first ? y : std::max(high_y, y);
      first = false;
    }
  }
  if (first) throw std::invalid_argument("svg_plot: there is no point");
  low_x *= 0.85;
  high_x *= 1.15;
  const double margin = std::max(0.05 * (high_y - low_y), 1e-6);
  low_y -= margin;
  high_y += margin;
  constexpr double left = 70, right = 680, top = 56, bottom = 420;
  const auto at_x = [&](double x) {
    return left + (right - left) * std::log(x / low_x) / std::log(high_x / low_x);
  };
  const auto at_y = [&](double y) {
    return bottom - (bottom - top) * (y - low_y) / (high_y - low_y);
  };
  std::string out;
  const auto put = [&](const char* format, auto... values) {
    char text[256];
    std::snprintf(text, sizeof text, format, values...);
    out += text;
  };
  static constexpr const char* colours[] = {"#1b6ca8", "#c8501e", "#2a8c4a", "#7d3fa0",
                                            "#8a6d00", "#555555", "#c2185b", "#00838f"};
  out +=
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 920 480\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"920\" height=\"480\" fill=\"white\"/>\n";
  put("<text x=\"%g\" y=\"22\" font-size=\"15\">", left);
  out += svg_escaped(title) + "</text>\n";
  put("<text x=\"%g\" y=\"42\" fill=\"#555\">", left);
  out += svg_escaped(note) + "</text>\n";
  for (const double x : log_ticks(low_x, high_x)) {
    put("<line x1=\"%.1f\" y1=\"%g\" x2=\"%.1f\" y2=\"%g\" stroke=\"#ddd\"/>\n", at_x(x), top,
        at_x(x), bottom);
    put("<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%g</text>\n", at_x(x), bottom + 18, x);
  }
  // All of them with the digits that the step has.
  const double step = linear_step(low_y, high_y);
  const int digits = std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)));
  for (const double y : linear_ticks(low_y, high_y)) {
    put("<line x1=\"%g\" y1=\"%.1f\" x2=\"%g\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", left, at_y(y),
        right, at_y(y));
    put("<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%.*f</text>\n", left - 6, at_y(y) + 4,
        digits, y);
  }
  put("<path d=\"M%g %gV%gH%g\" fill=\"none\" stroke=\"#555\"/>\n", left, top, bottom, right);
  put("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">", (left + right) / 2, bottom + 42);
  out += svg_escaped(x_name) + "</text>\n";
  put("<text transform=\"translate(16 %g) rotate(-90)\" text-anchor=\"middle\">",
      (top + bottom) / 2);
  out += svg_escaped(y_name) + "</text>\n";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const char* colour = colours[i % std::size(colours)];
    std::string path;
    for (const auto& [x, y] : lines[i].points) {
      char at[48];
      std::snprintf(at, sizeof at, "%s%.1f %.1f", path.empty() ? "M" : "L", at_x(x), at_y(y));
      path += at;
      put("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"%s\"/>\n", at_x(x), at_y(y), colour);
    }
    out +=
        "<path d=\"" + path + "\" fill=\"none\" stroke=\"" + colour + "\" stroke-width=\"1.5\"/>\n";
    const double y = top + 12 + 18.0 * static_cast<double>(i);
    put("<path d=\"M%g %gh18\" stroke=\"%s\" stroke-width=\"1.5\"/>\n", right + 12, y - 4, colour);
    put("<rect x=\"%g\" y=\"%g\" width=\"6\" height=\"6\" rx=\"3\" fill=\"%s\"/>\n", right + 18,
        y - 7, colour);
    put("<text x=\"%g\" y=\"%g\">", right + 36, y);
    out += svg_escaped(lines[i].name) + "</text>\n";
  }
  // Labels over all lines: each twice, first as a rim of white.
  for (std::size_t i = 0; i < lines.size(); ++i) {
    for (std::size_t p = 0; p < std::min(lines[i].labels.size(), lines[i].points.size()); ++p) {
      const auto& [x, y] = lines[i].points[p];
      for (const bool is_rim : {true, false}) {
        const char* colour = is_rim ? "white" : colours[i % std::size(colours)];
        put("<text x=\"%.1f\" y=\"%.1f\" font-size=\"10\" fill=\"%s\"%s>", at_x(x) + 7, at_y(y) + 4,
            colour, is_rim ? " stroke=\"white\" stroke-width=\"3\"" : "");
        out += svg_escaped(lines[i].labels[p]) + "</text>\n";
      }
    }
  }
  return out + "</svg>\n";
}

/// @throws std::runtime_error  naming the file that cannot be written
inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (!file.flush()) throw std::runtime_error("fidelity: cannot write " + path.string());
}

}  // namespace fidelity
