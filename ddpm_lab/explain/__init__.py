"""The half that explains: frames, statistics, findings and figures, all computed from records, never with torch."""
