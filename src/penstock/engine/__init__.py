"""The broker without a wire: core and storage joined by a clock, timers and a dispatcher."""
