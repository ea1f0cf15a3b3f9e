"""Two ends of a board in the threads of one process."""

import threading


def in_both(boards, act):
    results = [None, None]

    def run(rank):
        results[rank] = act(boards[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
