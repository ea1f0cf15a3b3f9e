"""What watches and steers the user's function while it runs: functions as they were called, operators as they run."""
