"""Two ends of a board in the threads of one process."""

import random
import sys
import threading

from millstream.data_parallel import board as board_module


def in_both(boards, act):
    """What ``act`` returns with each end. One that fails counts as a process that has ended: the other one hears it."""
    results, errors = [None, None], []

    def run(rank):
        try:
            results[rank] = act(boards[rank])
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)
            boards[0].ended_processes.add(1000 + rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def in_turns(boards, act, seed):
    """As ``in_both``, but one thread at a time: after each line of the board's code ``seed`` says which one goes on."""
    rng, is_turn, ended, turn = random.Random(seed), threading.Condition(), set(), 0

    def choose_next():
        nonlocal turn
        turn = rng.choice([rank for rank in range(2) if rank not in ended] or [0])
        is_turn.notify_all()

    def take_turns(board):
        def trace(frame, event, argument):
            if frame.f_code.co_filename != board_module.__file__:
                return None
            with is_turn:
                choose_next()
                is_turn.wait_for(lambda: turn == board.rank)
            return trace

        with is_turn:
            is_turn.wait_for(lambda: turn == board.rank)
        sys.settrace(trace)
        try:
            return act(board)
        finally:
            sys.settrace(None)
            with is_turn:
                ended.add(board.rank)
                choose_next()

    return in_both(boards, take_turns)
